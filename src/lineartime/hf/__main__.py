"""`python -m lineartime.hf serve FOLDER`: the command line of transformers, with lineartime's models registered.

`serve` is a server for clients of OpenAI's protocol, and `chat` talks to such a server: see docs/transformers.md.
"""

import transformers
from transformers.cli.transformers import app

from lineartime.hf import MODELS


def main() -> None:
    """Run the command of transformers that the arguments name."""
    for model in MODELS.values():
        setattr(transformers, model.__name__, model)  # the server looks up classes there, not in the Auto classes
    app(prog_name="python -m lineartime.hf")


if __name__ == "__main__":
    main()
