"""Monitor: telemetry in; workload state, timeline, dashboard and the run's report out.

owns      the timeline and the rows of the report
consumes  `telemetry.>`, `queue.>`, training telemetry, shift events, completed steps
produces  `workload.state`, `metrics.jsonl`, TensorBoard, `timeline.png`
"""
