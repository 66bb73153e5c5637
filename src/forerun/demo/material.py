"""The demo's prompts and models: a chat model, or the bundled models, as trained or widened to a realistic cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from forerun.annotations import ProgressCallback
from forerun.config import AUTO
from forerun.demo.chat_model import cached_file
from forerun.draft.auto import resolve_auto
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.drafters import draft_label
from forerun.errors import InvalidRequest
from forerun.heads.kinds import HEADS
from forerun.heads.widen import cached_widened_drafter, planned
from forerun.llm import LLM
from forerun.models.bundled import BUNDLED, BUNDLED_NAMES, DRAFT, TARGET
from forerun.models.config import amount
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider, cached_widened
from forerun.request import Message, Request

TARGET_PARAMETERS, DRAFT_PARAMETERS = 500_000_000, 21_000_000
CHAT_DRAFT = "auto"  # the chat model's drafter
BUNDLED_DRAFT = f"mix[ngram,model:{DRAFT}]"
PASSAGE = (
    "The lighthouse on Gull Island was built in 1874 after three ships were lost on the reef in one winter. Its lamp "
    "burned oil until 1931, when a cable brought electricity from the mainland. The last keeper, Ellen Marsh, left in "
    "1982, and since then the light has run by itself. Volunteers paint the tower every second summer, and in August "
    "visitors may climb its 112 steps."
)
QUESTIONS = {  # for a chat model: the turns of one conversation for each category of Spec-Bench
    "writing": (
        "Write a short blog post about a weekend in Lisbon, with food and sights worth seeing.",
        "Rewrite your post as a list of five tips, one sentence each.",
    ),
    "roleplay": (
        "You are a ship's cook in 1750. Tell a new sailor what a day in your galley is like.",
        "What do you cook when the ship has been at sea for three months?",
    ),
    "reasoning": (
        "Anna is taller than Ben, and Ben is taller than Carl. Who is the shortest, and how do you know?",
        "Dora is taller than Anna. List all four from the tallest to the shortest.",
    ),
    "maths": (
        "A garden is 8 metres long and 5 metres wide. What are its area and its perimeter?",
        "Its length is doubled. What are the area and the perimeter now?",
    ),
    "coding": (
        "Write a Python function that returns the largest number in a list, and explain it in one sentence.",
        "Change the function so that it returns the smallest number as well.",
    ),
    "extraction": (
        "Extract the name, the city and the job of each person from this text as JSON: Maria Lopez is a nurse in "
        "Madrid. Tom Reed drives a bus in Leeds. Aiko Sato teaches chemistry in Osaka.",
        "Add the country to each of them.",
    ),
    "science": (
        "How does a plant make sugar from light? Explain photosynthesis to a pupil of twelve.",
        "What would happen to plants if the air held no carbon dioxide?",
    ),
    "history": (
        "Why did the Roman Empire in the West fall? Name the main causes.",
        "Explain the two most important of these causes in more detail.",
    ),
    "translation": (
        "Translate German to English: Der Zug nach Hamburg fährt heute zehn Minuten später ab, weil ein Signal "
        "repariert wird.",
    ),
    "summary": (f"Summarize this text in two sentences.\n\n{PASSAGE}",),
    "knowledge": ("Who wrote Pride and Prejudice, and what is it about?",),
    "sums": ("A box holds 12 eggs. A cook buys 4 boxes and uses 30 eggs. How many eggs are left? Show each step.",),
    "passage": (f"{PASSAGE}\n\nWhen was the lighthouse built, and who was its last keeper?",),
}


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A question to a chat model, or a text to continue; `name`: the category or the file.

    `repeats`: whether the text repeats itself, which suits n-grams. A question may have turns `before` and `later`.
    """

    name: str
    text: str
    is_chat: bool = False
    repeats: bool = False
    before: Sequence[Message] = ()
    later: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The name; for a chat, also the question."""
        lines = (line for line in self.text.splitlines() if line not in ("", PASSAGE))
        return f"{self.name}: {' '.join(lines)}" if self.is_chat else self.name

    @property
    def shown(self) -> str:
        """The text as displayed before its answer."""
        return f"{self.text}\n\n" if self.is_chat else self.text

    def tokens(self, llm: LLM) -> list[int]:
        """The prompt's tokens; a question is rendered by the chat template."""
        prompt = llm.chat_prompt([*self.before, chat_message("user", self.text)]) if self.is_chat else self.text
        return llm.requests.prompt_tokens(Request.of(prompt))

    def after(self, answer: str) -> DemoPrompt | None:
        """The next question after this answer; None after the last one."""
        if not self.later:
            return None
        before = [*self.before, chat_message("user", self.text), chat_message("assistant", answer)]
        return replace(self, text=self.later[0], before=before, later=self.later[1:])


def chat_message(role: str, text: str) -> Message:
    """A chat message of a role."""
    return {"role": role, "content": text}


def load_prompts() -> Sequence[DemoPrompt]:
    """The demo's prompts, from files of the standard library that no bundled model was trained on."""
    text = resources.files("forerun").joinpath("bundled/stdlib/prompts.json").read_text(encoding="utf-8")
    entries = json.loads(text)["prompts"]
    return [DemoPrompt(entry["path"], entry["text"], repeats=entry["drafter"] == "ngram") for entry in entries]


def chat_prompts() -> Sequence[DemoPrompt]:
    """The demo's questions for a chat model."""
    return [DemoPrompt(name, first, is_chat=True, later=later) for name, (first, *later) in QUESTIONS.items()]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target (folder or bundled name) and the spec of its drafter."""

    target: str = TARGET
    draft: str = BUNDLED_DRAFT

    @classmethod
    def served(cls) -> Pair:
        """The models of `make serve`: the chat model if downloaded, else the widened bundled target."""
        file = cached_file()
        return cls.widened(f"mix[ngram,suffix,model:{DRAFT}]") if file is None else cls(str(file), CHAT_DRAFT)

    @classmethod
    def widened(cls, draft: str = BUNDLED_DRAFT, progress: ProgressCallback | None = None) -> Pair:
        """The bundled target and a drafter, widened at first use: the same texts at the cost of larger models.

        Raises InvalidRequest for a drafter that cannot be widened.
        """
        return cls(*widened_pair(TARGET, draft, progress))

    @property
    def name(self) -> str:
        """The target's name when served."""
        return Path(self.target).stem if self.target.endswith(".gguf") else TARGET

    @property
    def title(self) -> str:
        """The names of the target and its drafter, marked if widened."""
        return f"target {title(self.target)}, draft {draft_label(str(self.spec))}"

    @property
    def spec(self) -> DraftSpec:
        """The drafter's spec, with `auto` resolved for this target."""
        return resolve_auto(parse_spec(self.draft), Blueprint.of(self.target))

    def load(self, depth: int | str = AUTO, progress: ProgressCallback | None = None) -> LLM:
        """Load target and drafter with this depth, without a prefix cache, so that both sides prefill the prompts."""
        return LLM(self.target, self.draft, speculation=depth, max_num_seqs=1, prefix_cache=False, progress=progress)


def widened_pair(target: str, draft: str, progress: ProgressCallback | None) -> tuple[str, str]:
    """(folder of a bundled target, spec of its drafter) at the demo's sizes.

    Draft models are widened to DRAFT_PARAMETERS, drafters that read the target's states are widened with the target,
    text drafters are unchanged, and `auto` is resolved for the original target. Before anything is written, raises
    InvalidRequest for a target or draft model that is not bundled or cannot be widened, and ModelError for an unusable
    drafter.
    """
    if target not in BUNDLED:
        raise InvalidRequest("widen", f"{target} is not one of the bundled models {BUNDLED_NAMES}.")
    spec = resolve_auto(parse_spec(draft), Blueprint.of(target))
    wider = Wider.of(Blueprint.of(target).config, TARGET_PARAMETERS)
    require_widenable(spec, target, wider)
    wide = cached_widened(target, wider, progress)
    return str(wide), str(widened_draft(spec, target, wide, wider, progress))


def widen(name: str, num_parameters: int, progress: ProgressCallback | None) -> str:
    """The folder of a bundled model at another size."""
    wider = Wider.of(Blueprint.of(name).config, num_parameters)
    return str(cached_widened(name, wider, progress))


def require_widenable(spec: DraftSpec, target: str, wider: Wider) -> None:
    """Raise an error if a drafter or one of its members cannot be widened."""
    for member in spec.members:
        require_widenable(member, target, wider)
    if spec.name in HEADS and spec.argument is not None:
        planned(str(spec), target, wider, seed=0)
    argument = spec.argument
    if spec.name == "model" and argument not in BUNDLED and Path(argument or "") not in BUNDLED.values():
        raise InvalidRequest("widen", f"{spec} is not one of the bundled models {BUNDLED_NAMES}.")


def widened_draft(
    spec: DraftSpec, target: str, wide: Path, wider: Wider, progress: ProgressCallback | None
) -> DraftSpec:
    """The spec of a drafter, widened for the target in the folder `wide`."""
    if spec.name == "model" and spec.argument is not None:
        return replace(spec, argument=widen(spec.argument, DRAFT_PARAMETERS, progress))
    if spec.name in HEADS and spec.argument is not None:
        return cached_widened_drafter(str(spec), target, wide, wider)
    members = [widened_draft(member, target, wide, wider, progress) for member in spec.members]
    return replace(spec, members=tuple(members))


def title(model: str) -> str:
    """A checkpoint's name and size."""
    plan = Blueprint.of(model)
    size = f"{amount(plan.num_bytes // plan.dtype.itemsize)} parameters"
    return plan.config.widened or f"{Path(plan.name).name.removesuffix('.gguf')} ({size})"
