"""`python -m lineartime.hf serve FOLDER`: the command line of transformers, with lineartime's models registered.

`serve` is a server for clients of OpenAI's protocol, and `chat` talks to such a server: see docs/transformers.md.
"""

import sys
from functools import wraps
from typing import Any

import transformers
from transformers.cli.transformers import app

from lineartime.errors import LineartimeError, require_packages, typed_first_line
from lineartime.hf import MODELS


def main() -> None:
    """Run the command of transformers that the arguments name."""
    for model in MODELS.values():
        setattr(transformers, model.__name__, model)  # the server looks up classes there, not in the Auto classes
    if "serve" in sys.argv[1:2]:
        try:
            require_packages("fastapi", "openai", "pydantic", "uvicorn", extra="serve", purpose="The server")
        except LineartimeError as error:
            sys.exit(f"error: {error}")
        _mend_server()
    app(prog_name="python -m lineartime.hf")


def _mend_server() -> None:
    """Let the server list the model that it serves, not the hub's cache, and answer a wrong request by 400 with the reason."""
    from fastapi.responses import JSONResponse
    from transformers.cli.serving import server

    build = server.build_server

    def refuse(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": typed_first_line(error)}}, status_code=400)

    @wraps(build)
    def mended(models: Any, *arguments: Any, **options: Any) -> Any:
        if models.force_model is not None:
            served = {"id": models.force_model, "object": "model", "created": 0, "owned_by": ""}
            models.get_gen_models = lambda: [served]
        made = build(models, *arguments, **options)
        for kind in (ValueError, KeyError):
            made.exception_handler(kind)(refuse)
        return made

    server.build_server = mended


if __name__ == "__main__":
    main()
