"""The service: sandboxes of this node over HTTP, in the shapes that E2B's public SDK speaks.

| module | what |
|---|---|
| `law` | timeouts, paging, signatures, endings of programs: pure |
| `templates` | names to specs, from a settings file |
| `stock` | where they come from: a provider, or a pool |
| `node` | the sandboxes of this node and their ends |
| `programs` | running programs, heard by any number of callers |
| `inside` | files of a sandbox as one of its users sees them |
| `wire`, `protobuf`, `connect` | messages, their two encodings, the Connect protocol |
| `control`, `process_face`, `file_face` | the routes |
| `app`, `serving` | all of it behind one address |
| `fleet_law`, `router` | many nodes behind one address |

Starlette and uvicorn are imported when something is served.
"""

from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.serving import Listen, serve_node
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.templates import Template, load_templates

__all__ = ["Listen", "Node", "ServiceSettings", "Template", "load_templates", "serve_node"]
