"""The lifecycle of one worker on a node, and the node services that workers use."""
