"""Who gets the devices: shift pairs, candidates, their evaluation, the planner, and the baselines.

Pure: events and the time go in, effects come out (paper §7, Appendix D).
"""
