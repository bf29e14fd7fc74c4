"""Who may do what: API keys, projects with quotas, secrets, and the audit log.

`door` stands before the gateway and the management API and lets nobody pass whom `decide` does not; what it goes by is
in `table`, which the view has from Redis. The rest are the verbs: `keys_api`, `projects_api`, `secrets_api`,
`audit_api`. Calls within the system (gateway to worker, node to Redis) show tokens of their own and do not come here.
"""
