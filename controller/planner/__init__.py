"""The cold start planner: sizes and places a start. Values and `now` in, a `Plan` out; no I/O, no clock.

`make_plan(request, cluster, now_s)` is the entry point. `estimates` learns measures from observations, `node_state`
derives a node's state from its report and orders, `accuracy_report` compares a plan with its outcome. Orders, Redis and
the mapping of plans onto workers belong to the scheduler. Source: HydraServe sections 4, 5 and 6.1.
"""
