"""The history of calls: per-minute and per-hour counts in Redis, and events such as deploys and failed starts.

Gateways write the counts (`writer`), the API reads them (`reader`, `service`). `call_counts` and `series` are pure.
"""
