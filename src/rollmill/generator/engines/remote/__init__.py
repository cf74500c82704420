"""What engines have in common whose server runs in a process and an environment of its own.

`RemoteEngine` answers the engine protocol; a `ServerPort` says it in the words of one server.
"""
