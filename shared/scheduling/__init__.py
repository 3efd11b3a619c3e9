"""Where each sequence of a role runs: dispatch, and migration when replicas shift (paper §6, Appendix C).

Pure: events and the time go in, effects come out. Only numbers of tokens are known here, never their content.
"""
