"""Rollout: draws prompts within the staleness bound and has the policy answer them.

owns      the prompt stream, the waiting queue of policy sequences, which rollout replicas serve
consumes  `policy.version`, replica progress and telemetry, shift commands
produces  `sample.trajectory`, `queue.rollout`
"""
