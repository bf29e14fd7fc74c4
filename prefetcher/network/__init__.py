"""Network access of workers: the egress proxy out, and connections in to workers inside gVisor."""
