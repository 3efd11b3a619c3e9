"""A whole run on a simulated cluster: engines by model, the schedulers, planner and staleness of the
services.

Pure and seeded: the same scenario, mode and seed give the same bytes.
"""
