"""How long a role service waits for its replicas. Read at each use, so that tests may be impatient."""

COMMAND_DEADLINE_S = 30.0
WAKE_DEADLINE_S = 90.0
SILENCE_S = 2.0
"""A replica silent for this long is asked whether it lives."""
DEATH_S = 20.0
"""One that neither reports nor answers for this long is taken for dead."""
SHIFT_MARGIN_S = 2.0
"""Left of a shift's deadline for the answer to get back."""
HEALTH_INTERVAL_S = 0.5
PING_DEADLINE_S = 2.0
SETTLE_S = 3.0
"""How long a sequence that an abort did not find may take to show up as finished."""
