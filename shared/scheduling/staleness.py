"""How far rollout may run ahead of training (paper §8.1, Appendix E).

With version v trained, bound s and batch size b, at most (v + 1 + s)·b samples have been issued: whatever
is issued belongs to one of the next s + 1 batches. s = 0 is synchronous (colocated) training.

The bound holds only if batches are made in issue order. Were a batch made of whatever is finished, a slow
sample could be overtaken any number of times, and its staleness would have no limit.
"""


def num_issuable(version: int, staleness: int, batch_size: int, num_issued: int) -> int:
    """Samples that may be issued now, in addition to `num_issued`.

    >>> num_issuable(version=0, staleness=2, batch_size=8, num_issued=20)
    4
    """
    return max(0, (version + 1 + staleness) * batch_size - num_issued)


def sample_staleness(training_version: int, oldest_token_version: int) -> int:
    """Versions between the oldest token of a sample and the policy being trained; 0 if they are equal."""
    if oldest_token_version > training_version:
        raise ValueError(f"token of version {oldest_token_version} in a step of version {training_version}")
    return training_version - oldest_token_version
