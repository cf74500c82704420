"""What runs beside and inside a sandbox: the zygote, the set-up of a sandbox, and the agent that is its first process.

Standard library only and nothing else of Rollmill, because every sandbox is a fork of this code: each import costs
memory in every sandbox. The owner of the sandboxes uses the frames, the cgroups and the system calls too.
"""
