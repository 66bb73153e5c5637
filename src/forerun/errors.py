"""Every error that a user can meet, as one tree.

Each message contains the offending value and says what to do about it. Broken invariants are not in this tree: they are
`assert`s where they break.
"""

from __future__ import annotations

from collections.abc import Sequence


class ForerunError(Exception):
    """The root of all errors that forerun raises on purpose."""


class ModelError(ForerunError):
    """A checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """Neither a folder with config.json nor a hub id that could be fetched."""


class UnsupportedModel(ModelError):
    """The configuration asks for something the decoder does not compute."""


class MissingWeights(ModelError):
    """A shard or a tensor that the configuration promises is not there."""


class WrongShape(ModelError):
    """A tensor's shape disagrees with config.json."""


class ModelOutputInvalid(ModelError):
    """The model gave logits from which no token can be drawn: its weights or its arithmetic are broken."""


class WidenedDiffers(ModelError):
    """A new widened checkpoint failed its check: its logits are not those of its source."""


class TokenizerError(ModelError):
    """The tokenizer or the chat template is missing, damaged or not usable."""


class ChatTemplateError(TokenizerError):
    """The chat template, the model's own or the one that a request brings, is missing or cannot be used."""


class InvalidRequest(ForerunError, ValueError):
    """A request that cannot be served as it stands; `field` is the parameter at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single new token."""


class InvalidTree(InvalidRequest):
    """A static tree is malformed, or the file that should hold one cannot be read; `problem` says how."""

    def __init__(self, problem: str) -> None:
        super().__init__("speculation.tree", problem)
        self.problem = problem


class InvalidGrammar(InvalidRequest):
    """A grammar is malformed, uses what llguidance does not know, or needs more work than its limits allow."""

    def __init__(self, problem: str) -> None:
        super().__init__("grammar", problem)


class UnknownKeyword(ForerunError, TypeError):
    """A keyword that `function` does not have; `likely` is the one that was probably meant."""

    def __init__(self, function: str, name: str, likely: str | None) -> None:
        hint = f": did you mean {likely!r}?" if likely else "; help() lists what it has."
        super().__init__(f"{function}() has no keyword {name!r}{hint}")
        self.likely = likely


class UnknownSetting(ForerunError, ValueError):
    """A key of the settings file `path` that no option has; `likely` is the one that was probably meant."""

    def __init__(self, path: str, key: str, likely: str | None, known: Sequence[str]) -> None:
        hint = f"did you mean {likely!r}?" if likely else f"use some of {', '.join(known)}."
        super().__init__(f"{path}: there is no option {key!r}: {hint}")
        self.likely = likely


class DraftError(ForerunError):
    """A drafter cannot be built."""


class UnknownDrafter(DraftError, ValueError):
    """The draft specification does not parse, or names a drafter that does not exist."""


class VocabularyMismatch(DraftError):
    """The drafter's tokens cannot be compared with the target's: no tokenizer, or tokens that are no bytes."""


class PastFileError(DraftError):
    """A file of past answers that cannot be understood, read or written."""


class WrongTarget(DraftError):
    """The drafter reads the cache of another engine's target, or is not shown the states that it reads."""


class TrainingError(ForerunError):
    """A drafter cannot be trained."""


class UnusableData(TrainingError):
    """More lines of the training data cannot be used than a few that may be left out."""


class FolderTaken(TrainingError):
    """The folder of a training holds something else, a training with other settings, or a damaged checkpoint."""


class TrainingDiverged(TrainingError):
    """The loss of a training is infinite or NaN: what comes behind it would be worthless."""


class DeviceUnavailable(ForerunError):
    """The device asked for is not there, or something that is needed to use it."""


class OperatorMissing(DeviceUnavailable):
    """The device lacks an operator of torch."""

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"this device has no {operator} in this version of torch: set PYTORCH_ENABLE_MPS_FALLBACK=1 before the "
            "start, which computes it on the CPU, use a newer torch, or use --device cpu"
        )
        self.operator = operator


class RankLost(ForerunError):
    """A process that holds a part of the model has ended, does not answer, or computes something else."""


class NotEnoughMemory(ForerunError):
    """The memory plan does not fit: not even one sequence would."""


class MissingPackage(ForerunError):
    """What was asked for needs an optional package; the message names the pip extra that has it."""


class RequestFailed(ForerunError):
    """A round failed for the request of sequence `seq_id` alone; `__cause__` says why.

    Code that came with the request raised, or the model gave no logits to draw from.
    """

    def __init__(self, seq_id: int, problem: str = "a round failed for its request alone") -> None:
        super().__init__(f"sequence {seq_id}: {problem}")
        self.seq_id = seq_id

    @property
    def told(self) -> Exception:
        """The error to raise to the request's reader: the cause itself, if it is an ordinary exception.

        An exit, a cancellation or the end of an iterator would end the reader's program, task or loop instead; for
        these it is this error.
        """
        cause = self.__cause__
        is_ordinary = isinstance(cause, Exception) and not isinstance(cause, StopIteration | StopAsyncIteration)
        return cause if is_ordinary else self  # type: ignore[return-value]


class RoundFailed(RequestFailed):
    """Every round that reads sequence `seq_id` raises, even without guesses and other sequences; `__cause__` says why.

    Its request ends; other requests are not affected.
    """

    def __init__(self, seq_id: int, cause: BaseException) -> None:
        super().__init__(seq_id, f"rounds that read it raise {type(cause).__name__}, even alone; it has ended")
        self.__cause__ = cause

    @property
    def told(self) -> Exception:
        """The cause, if it is one of forerun's own errors, which say what to do; otherwise this error."""
        return self.__cause__ if isinstance(self.__cause__, ForerunError) else self


class OutOfMemory(RoundFailed):
    """Every round that reads sequence `seq_id`, even alone, needs more memory than the machine has left."""

    def __init__(self, seq_id: int, cause: BaseException) -> None:
        RequestFailed.__init__(
            self,
            seq_id,
            "no memory is left for a round that reads it, even alone; it has ended. Ask for less at once, or plan for "
            "less memory or a shorter context at the start.",
        )
        self.__cause__ = cause


class ReplicaLost(ForerunError):
    """The replica that answered a request was lost, and no other one could go on with the answer."""


class AnswerDiffers(ReplicaLost):
    """The replica that took an answer over gives other tokens than those that the reader has."""


class EngineClosed(ForerunError):
    """The engine has shut down; create a new one."""
