"""Wire formats of the generator service: `policy_inference.proto`, the minimal published interface
`rl_inference.proto`, and the code generated from them.

Generate it again after a change of the `.proto`, from the repository's root:

    python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src \\
        src/rollmill/generator/proto/policy_inference.proto src/rollmill/generator/proto/rl_inference.proto
"""
