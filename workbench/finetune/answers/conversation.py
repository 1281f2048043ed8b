"""Chat with one or several models; every model continues from its own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import ConfigError
from workbench.base.messages.rpc import OnPiece
from workbench.finetune.data.forms.messages import Message

_Ask = Callable[[str, Sequence[Message], OnPiece | None], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Question and the answer of every model."""

    asked: str
    answers: Mapping[str, str]
    """Answers by name of the model."""


class Conversation(LiveDisplayable):
    """Chat with one or several models.

    A notebook shows a text field and streams the answers.
    """

    def __init__(self, names: Sequence[str], ask: _Ask, *, system: str | None = None) -> None:
        self.names = tuple(names)
        self.exchanges: list[Exchange] = []
        self._ask = ask
        self._system = system

    def send(
        self, text: str, on_text: Callable[[str, str], None] | None = None
    ) -> Mapping[str, str]:
        """Ask the models in turn and wait for the answers.

        Args:
            text: Message of the user.
            on_text: Called with a model's name and the next piece of its answer.

        Returns:
            The answers by the name of the model.

        Raises:
            ConfigError: The text is empty.
            RunError: A model did not answer; the chat is as it was before.
        """
        if not text.strip():
            raise ConfigError("text is empty; say something")
        answers = {}
        for name in self.names:
            turns = self._turns(name, text.strip())
            on_piece = None if on_text is None else partial(on_text, name)
            answers[name] = self._ask(name, turns, on_piece)
        self.exchanges.append(Exchange(asked=text.strip(), answers=answers))
        return answers

    def clear(self) -> None:
        """Start over: clear all exchanges from the models' context."""
        self.exchanges.clear()

    def _turns(self, name: str, text: str) -> list[Message]:
        turns: list[Message] = []
        if self._system is not None:
            turns.append({"role": "system", "content": self._system})
        for exchange in self.exchanges:
            turns.append({"role": "user", "content": exchange.asked})
            turns.append({"role": "assistant", "content": exchange.answers[name]})
        return [*turns, {"role": "user", "content": text}]

    def __repr__(self) -> str:
        return f"Conversation({len(self.exchanges)} turns with {', '.join(self.names)})"
