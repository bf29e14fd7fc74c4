"""Links between the workers of one pipeline: frames over sockets that their nodes connected."""
