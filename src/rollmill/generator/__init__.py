"""Policy inference: engines, the replica around one, and its gRPC face.

Start at `rollmill.generator.main` (build and serve) and `rollmill.generator.client`; both load gRPC. `state` is pure.
"""
