"""The errors that users can see, as one tree of classes.

Each message contains the offending value and says what to do about it. Broken invariants are not in this tree: they are
`assert`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


class ForerunError(Exception):
    """The root of all errors that forerun raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles keep the message and the attributes; the constructors of subclasses take other values."""
        return Exception.__new__, (type(self), *self.args), self.__dict__


class ModelError(ForerunError):
    """A checkpoint cannot be used."""


class ModelNotFound(ModelError):
    """The model is neither a folder with config.json nor a hub id that could be downloaded."""


class UnsupportedModel(ModelError):
    """The model's configuration needs something that the decoder does not support."""


class MissingWeights(ModelError):
    """A shard or a tensor that the configuration requires is missing."""


class WrongShape(ModelError):
    """A tensor's shape disagrees with config.json."""


class ModelOutputInvalid(ModelError):
    """The model computed logits from which no token can be sampled: its weights or its arithmetic are broken."""


class WidenedDiffers(ModelError):
    """A new widened checkpoint failed its check: its logits differ from those of its source."""


class TokenizerError(ModelError):
    """The tokenizer or the chat template is missing, damaged or not usable."""


class ChatTemplateError(TokenizerError):
    """The chat template of the model or of a request is missing or cannot be used.

    `origin`: where it is stored, a part of the message.
    """

    def __init__(self, message: str, origin: str = "") -> None:
        super().__init__(message)
        self.origin = origin

    @property
    def for_clients(self) -> str:
        """The message without the folders of `origin`, which are no concern of a server's clients."""
        return str(self).replace(self.origin, PurePath(self.origin).name)


class InvalidRequest(ForerunError, ValueError):
    """A request that cannot be served; `field` is the parameter at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a single new token."""


class InvalidTree(InvalidRequest):
    """A static tree is malformed, or its file cannot be read; `problem` says why."""

    def __init__(self, problem: str) -> None:
        super().__init__("speculation.tree", problem)
        self.problem = problem


class InvalidGrammar(InvalidRequest):
    """A grammar is malformed, uses a feature that llguidance lacks, or needs more work than its limits allow."""

    def __init__(self, problem: str) -> None:
        super().__init__("grammar", problem)


class UnknownKeyword(ForerunError, TypeError):
    """A keyword that `function` does not have; `likely` is the keyword that was probably meant."""

    def __init__(self, function: str, name: str, likely: str | None) -> None:
        hint = f": did you mean {likely!r}?" if likely else "; help() lists its keywords."
        super().__init__(f"{function}() has no keyword {name!r}{hint}")
        self.likely = likely


class UnknownSetting(ForerunError, ValueError):
    """A key of the settings file `path` that is not an option; `likely` is the option that was probably meant."""

    def __init__(self, path: str, key: str, likely: str | None, known: Sequence[str]) -> None:
        hint = f"did you mean {likely!r}?" if likely else f"the options are {', '.join(known)}."
        super().__init__(f"{path}: there is no option {key!r}: {hint}")
        self.likely = likely


class DraftError(ForerunError):
    """A drafter cannot be built."""


class UnknownDrafter(DraftError, ValueError):
    """The draft specification does not parse, or names a drafter that does not exist."""


class DrafterFileError(DraftError, ValueError):
    """The file of a drafter `python:FILE.py:CLASS` cannot be used; `trace` is the traceback of the user's code."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class CodeRefused(DraftError, ValueError):
    """A record or a settings file names a drafter that would run a Python file, which only a user may do."""


class VocabularyMismatch(DraftError):
    """The drafter's tokens cannot be compared with the target's: no tokenizer, or tokens that are not bytes."""


class PastFileError(DraftError):
    """A file of past answers that is damaged, or that cannot be read or written."""


class InvalidDraft(DraftError):
    """A drafter's `propose` returned something else than a Draft."""


class WrongTarget(DraftError):
    """The drafter reads the KV cache of another engine's target, or does not get the states that it needs."""


class TrainingError(ForerunError):
    """A drafter cannot be trained."""


class UnusableData(TrainingError):
    """Too many lines of the training data cannot be used."""


class FolderTaken(TrainingError):
    """The output folder of a training holds something else, a training with other settings, or a damaged checkpoint."""


class TrainingDiverged(TrainingError):
    """The loss of a training has become infinite or NaN."""


class DeviceUnavailable(ForerunError):
    """The requested device, or software that it needs, is not available."""


class OperatorMissing(DeviceUnavailable):
    """This version of torch lacks an operator for the device."""

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"this version of torch has no {operator} for this device: set the environment variable "
            "PYTORCH_ENABLE_MPS_FALLBACK=1, which computes it on the CPU, use a newer torch, or use --device cpu"
        )
        self.operator = operator


class RankLost(ForerunError):
    """A process that holds a part of the model has ended, does not answer, or computes different results."""


class NotEnoughMemory(ForerunError):
    """The memory budget is too small for even one sequence."""


class MissingPackage(ForerunError):
    """A feature needs an optional package; the message names the pip extra that installs it."""


class RequestFailed(ForerunError):
    """A round failed because of the request of sequence `seq_id`; `__cause__` is the reason.

    The request's own code raised, or no token could be sampled from the model's logits.
    """

    def __init__(self, seq_id: int, problem: str = "a round failed because of its request") -> None:
        super().__init__(f"sequence {seq_id}: {problem}")
        self.seq_id = seq_id

    @property
    def raised_to_client(self) -> Exception:
        """The error to raise to the client: the cause, if it is an ordinary exception, else this error.

        An exit, a cancellation or a StopIteration would end the client's program, task or loop.
        """
        cause = self.__cause__
        is_ordinary = isinstance(cause, Exception) and not isinstance(cause, StopIteration | StopAsyncIteration)
        return cause if is_ordinary else self  # type: ignore[return-value]


class RoundFailed(RequestFailed):
    """Every round with sequence `seq_id` raises `__cause__`, even without draft tokens and other sequences.

    Its request ends; other requests are not affected.
    """

    def __init__(self, seq_id: int, cause: BaseException) -> None:
        super().__init__(seq_id, f"rounds with it raise {type(cause).__name__}, even without others; it has ended")
        self.__cause__ = cause

    @property
    def raised_to_client(self) -> Exception:
        """The cause, if it is one of forerun's own errors, whose messages help; otherwise this error."""
        return self.__cause__ if isinstance(self.__cause__, ForerunError) else self


class OutOfMemory(RoundFailed):
    """Every round with sequence `seq_id`, even without other sequences, needs more memory than is available."""

    def __init__(self, seq_id: int, cause: BaseException) -> None:
        RequestFailed.__init__(
            self,
            seq_id,
            "no memory is left for a round with it, even without others; it has ended. Use a shorter prompt, or lower "
            "memory_bytes or max_model_len.",
        )
        self.__cause__ = cause


class ReplicaLost(ForerunError):
    """The replica that answered a request was lost, and no other replica could continue the answer."""


class AnswerDiffers(ReplicaLost):
    """The replica that continues an answer has computed other tokens than those that the client already has."""


class EngineClosed(ForerunError):
    """The engine has shut down; create a new one."""
