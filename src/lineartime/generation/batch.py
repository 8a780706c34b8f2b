"""Texts that are continued together, and that begin and end at any step: continuous batching.

Shapes: B texts, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.generation.ids import Ids
from lineartime.generation.prompts import PromptState, checked_prompt, read
from lineartime.generation.sampling import Sampling, chosen, draw
from lineartime.models.backbone import BackboneState, BackboneStreams
from lineartime.models.language_model import CausalLM, LanguageModel, check_finite_logits, check_model


@dataclass
class _Text:
    """A text of a batch.

    Attributes:
        position: the number of tokens read.
        state: what the model remembers, until the text joins the streams.
        logits: [V], after the prompt, until the first token is drawn.
        token: the token drawn last, which is not read yet.
    """

    position: int
    state: BackboneState | None
    logits: Tensor | None
    token: int = -1


class TextBatch:
    """Continues texts together, one token of each per step. Texts are added and removed between steps.

    With a model that steps in place, such as FLASH, a step takes the same time and memory however long the texts are. When
    texts were added or removed, the next step copies all states once.

    Args:
        model: a causal language model, in evaluation mode.
        sampling: how to draw; one generator draws for all texts, so that what is drawn for one depends on the others.

    Raises:
        ArgumentError: for an argument of the wrong type.
    """

    def __init__(self, model: LanguageModel, sampling: Sampling | None = None) -> None:
        self._model = check_model(model, CausalLM, "generate")
        self._sampling = chosen(sampling)
        self._generator = self._sampling.generator()
        self._texts: dict[int, _Text] = {}
        self._added = 0
        self._joined: list[int] = []
        self._streams: BackboneStreams | None = None

    def __len__(self) -> int:
        """The number of texts, B."""
        return len(self._texts)

    def add(self, prompt: Ids, state: PromptState | None = None) -> int:
        """Read a prompt, and continue it from the next step on.

        Args:
            prompt: token ids; at least one without a `state`.
            state: of a text before the prompt, as `read_prompt` returns it; it is not modified.

        Returns:
            The number of the text; no two texts of a batch have the same.

        Raises:
            ArgumentError: as `read_prompt`.
        """
        read_so_far = read(self._model, checked_prompt(self._model, "prompt", prompt, state), state)
        number, self._added = self._added, self._added + 1
        self._texts[number] = _Text(read_so_far.position, read_so_far.state, read_so_far.logits)
        return number

    def remove(self, number: int) -> None:
        """End a text. Raises ArgumentError unless it is in the batch."""
        if number not in self._texts:
            raise ArgumentError("number", f"is {number!r}, but must be that of a text in this batch, as `add` returned it.")
        del self._texts[number]

    def step(self) -> dict[int, int]:
        """Draw the next token of every text: tokens by the number of the text.

        Raises:
            ArgumentError: if a text is as long as the model can read.
            LineartimeError: if the logits are not finite.
        """
        going = [number for number, text in self._texts.items() if text.logits is None]
        new = [number for number in self._texts if number not in going]
        if not self._texts:
            return {}
        with torch.no_grad():
            logits = self._read(going) if going else []
            logits += [text.logits for text in self._texts.values() if text.logits is not None]  # of the new ones
            drawn: list[int] = draw(torch.stack(logits), self._sampling, self._generator).tolist()
        check_finite_logits(min(drawn) >= 0)
        tokens = dict(zip([*going, *new], drawn, strict=True))
        for number, token in tokens.items():
            self._texts[number].token, self._texts[number].logits = token, None
        return tokens

    def _read(self, numbers: list[int]) -> list[Tensor]:
        """Read the last token of some texts: the logits after each."""
        longest = self._model.config.longest_sequence
        for number in numbers:
            if longest is not None and self._texts[number].position >= longest:
                raise ArgumentError("number", f"{number} is a text of {longest} tokens, the most this model reads: remove it.")
        self._join(numbers)
        assert self._streams is not None
        ids = torch.tensor([[self._texts[number].token] for number in numbers], device=next(self._model.parameters()).device)
        logits = self._model.step(ids, self._streams)[:, 0]
        for number in numbers:
            self._texts[number].position += 1
        return list(logits)

    def _join(self, numbers: list[int]) -> None:
        """Let the streams be those of some texts, in this order."""
        if numbers == self._joined:
            return
        states: dict[int, BackboneState | None] = {number: self._texts[number].state for number in numbers}
        if self._streams is not None:
            states |= dict(zip(self._joined, self._model.separate_streams(self._streams), strict=True))
        self._streams = self._model.join_streams([state for number in numbers if (state := states[number]) is not None])
        self._joined = numbers
        for number in numbers:
            self._texts[number].state = None
