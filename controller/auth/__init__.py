"""Authentication and authorization: API keys, projects with quotas, secrets, and the audit log.

`middleware` stands before the gateway and the management API and passes a request on if `authorize` and the rule of its
route (`route_rules`) allow it. Both decide by the access table of the view, which is synced from Redis. Calls within
the system (gateway to worker, node to Redis) have tokens of their own and do not come here.
"""
