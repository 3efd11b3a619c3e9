"""Reward: R = R_verifiable + R_GenRM for every finished trajectory, or a typed *unscored*.

owns      the waiting queue of GenRM sequences, which reward replicas serve, retries and deadlines
consumes  `sample.trajectory`, replica progress and telemetry, shift commands
produces  `sample.scored`, `queue.reward`
"""
