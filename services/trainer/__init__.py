"""Trainer: collects complete groups into batches, drives the ranks, publishes each new policy.

owns      the step counter, checkpoints, which samples were trained
consumes  `sample.scored`, shift commands
produces  `training.step`, training telemetry; `policy.version` through GPS
"""
