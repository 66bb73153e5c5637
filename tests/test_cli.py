"""The command line: clean text on standard output, everything else on standard error, mistakes in one line.

Most tests answer with a scripted model, so that the expected output is known exactly; the last ones run the real pair.
"""

import io
import json
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import Result
from typing_extensions import override

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, Segment
from forerun.accept.outcome import Outcome, RowOutcome, Stats
from forerun.accept.stop import StopChecker
from forerun.cache.plan import MemoryShares, ModelMemory
from forerun.card import Painter
from forerun.commands.answering import Reply
from forerun.errors import ModelNotFound
from forerun.llm import LLM
from forerun.options import LoadingOptions, ModelOptions
from forerun.sampling.params import SamplingParams
from forerun.serve.parts import AnswerForm
from forerun.streams import show_warnings
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import SMALL, TARGET
from kit.command import command, refusal

TOKENIZER = Tokenizer.load(TARGET)
STORY = TOKENIZER.encode("Once upon a time, there was a dog.\nIt ran.")
ORIGINS = (Origin.DRAFTED, Origin.DRAFTED, Origin.RECOVERED)


class ScriptedLLM(LLM):
    """Answers STORY in rounds of three tokens: two drafted, one recovered. Records its requests."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.tokenizer = TOKENIZER
        self.fingerprint, self.format, self.kernels = "0123456789abcdef", "bfloat16, int8 weights", "AVX2 kernels"
        self.measured = "measured here: 1.3 times as fast as torch's operators, float32"
        self.plan = MemoryShares(ModelMemory(1, 1, 0, 64), max_num_seqs=1, budget_bytes=10**6).plan()
        self.received: list[tuple[str | Sequence[int], SamplingParams]] = []
        self.interrupt_at = interrupt_at
        self.closed = 0
        self.warns = False
        self._stats = Stats()

    @property
    @override
    def stats(self) -> Stats:
        return self._stats

    @property
    @override
    def drafter_names(self) -> Sequence[str]:
        return ("ngram", "cascade[ngram,model:A]", "merged")

    @override
    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: object = None,
        tenant: str = "",
        progress: Callable[[str, float], None] | None = None,
    ) -> Iterator[Delta]:
        params = sampling_params
        assert params is not None
        assert progress is not None
        progress("reading the prompt", 0.5)
        self.received.append((prompt, params))
        checker = StopChecker(params, [2], TOKENIZER, 99)
        try:
            for start in range(0, len(STORY), 3):
                if start == self.interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                if self.warns:
                    logging.getLogger("forerun.engine").warning("slow")
                run = STORY[start : start + 3]
                stop = checker.push(run)
                self._stats.record(Outcome([RowOutcome(0, 3, 3, 2, len(run))], 0, 0.0, 0.0))
                yield Delta(
                    request_id=0,
                    sample=0,
                    seq_id=0,
                    token_ids=tuple(run[: stop.num_kept]),
                    origins=ORIGINS[: stop.num_kept],
                    segments=tuple(Segment(p.text, ORIGINS[p.ordinal % 3]) for p in stop.pieces),
                    logprobs=(),
                    finish_reason=stop.finish_reason,
                    stop_reason=stop.stop_reason,
                )
                if stop.finish_reason is not None:
                    return
        finally:
            self.closed += 1


def load_instead(monkeypatch: pytest.MonkeyPatch, build: Callable[..., object]) -> None:
    """Commands get what `build` returns instead of a model."""
    monkeypatch.setattr("forerun.commands.answering.build_llm", build)
    monkeypatch.setattr("forerun.commands.answering.require_template", lambda spec: None)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    model = ScriptedLLM()
    load_instead(monkeypatch, lambda options, console: model)
    return model


def generate(*arguments: str, stdin: str | None = None, **env: str) -> Result:
    return command("generate", "--model", "some/model", *arguments, stdin=stdin, **env)


def test_the_text_goes_to_standard_output_and_nothing_else_does(llm: ScriptedLLM) -> None:
    result = generate("Prompt", "--draft", "ngram", "--max-tokens", str(len(STORY)))
    assert result.exit_code == 0
    assert result.stdout == TOKENIZER.decode(STORY, skip_special_tokens=True)
    assert llm.closed == 1
    for word in ("some/model", "ngram, depth auto", "tokens/s", "tokens per round", "3.00", "66.7%", "1.00 1.00 0.00"):
        assert word in result.stderr
    assert all(line in result.stderr for line in llm.plan.lines())
    assert str(llm.received[0][1].seed) in result.stderr
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    assert f"AVX2 kernels, bfloat16, int8 weights, {threads}" in result.stderr
    assert llm.fingerprint in result.stderr


def test_for_a_mix_every_drafters_rounds_and_tokens_are_printed(llm: ScriptedLLM) -> None:
    """Of a row that all members drafted together, a token counts for the drafter that proposed it first."""
    assert "by drafter" not in generate("x").stderr
    llm.stats.record(Outcome([RowOutcome(0, 4, 3, 2, 3, 2, {0: (3, 2), 1: (1, 0)})], 0, 0.0, 0.0))
    shown = " ".join(generate("x").stderr.split())
    lines = (
        "ngram in 0 rounds, 2 of 3 accepted",
        "cascade[ngram,model:A] in 0 rounds, 0 of 1 accepted",
        "merged in 1 round",
    )
    assert f"by drafter {' '.join(lines)}" in shown
    assert "mix[ngram,model:A], depth auto" in generate("x", "--draft", "mix[ngram,model:A]").stderr
    by_drafter = json.loads(generate("x", "--json").stdout)["stats"]["arms"]
    assert by_drafter["ngram"] == {"num_rounds": 0, "num_drafted": 3, "num_accepted": 2}
    assert by_drafter["merged"] == {"num_rounds": 1, "num_drafted": 0, "num_accepted": 0}


def test_options_reach_the_sampling_parameters(llm: ScriptedLLM) -> None:
    given = (
        "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --seed 5 --max-tokens 6 --stop x --stop yy --ignore-eos"
    )
    generate("Prompt", *given.split())
    prompt, params = llm.received[0]
    assert prompt == "Prompt"
    assert params == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=5, max_tokens=6, stop=("x", "yy"), ignore_eos=True
    )


def test_options_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ModelOptions] = []

    def build(options: ModelOptions, console: Console) -> LLM:
        seen.append(options)
        return ScriptedLLM()

    load_instead(monkeypatch, build)
    given = "--draft model:DIR --depth 3 --verification block --dtype bfloat16 --quantize int8 --kernels torch"
    given += " --max-model-len 100 --memory-bytes 9000 --threads 2"
    assert generate("x", *given.split()).exit_code == 0
    assert generate("x").exit_code == 0
    assert seen[0] == ModelOptions(
        "some/model", "model:DIR", "3", "block", LoadingOptions("bfloat16", "int8", "torch", 2), 100, 9000
    )
    assert seen[1] == ModelOptions("some/model")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_come_from_standard_input(llm: ScriptedLLM, arguments: tuple[str, ...]) -> None:
    generate(*arguments, stdin="two\nlines\n\n")
    assert llm.received[0][0] == "two\nlines\n"


def test_colours_distinguish_origins_and_add_nothing_to_the_text(llm: ScriptedLLM) -> None:
    painted = generate("x", "--max-tokens", "6", FORCE_COLOR="1").stdout
    assert painted == (
        "\x1b[32mOnce\x1b[0m\x1b[32m upon\x1b[0m\x1b[33m a\x1b[0m"
        + "\x1b[32m time\x1b[0m\x1b[32m,\x1b[0m\x1b[33m there\x1b[0m\n"
    )


@pytest.mark.parametrize(
    ("arguments", "env"), [((), {}), (("--raw",), {"FORCE_COLOR": "1"}), ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"})]
)
def test_options_and_environment_variables_switch_colours_off(
    llm: ScriptedLLM, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    result = generate("x", "--max-tokens", "6", *arguments, **env)
    assert result.stdout.rstrip("\n") == "Once upon a time, there"
    assert "\x1b[3" not in result.stderr


def test_json_is_one_object_with_everything(llm: ScriptedLLM) -> None:
    result = generate("x", "--json", "--draft", "ngram", "--seed", "9", "--max-tokens", str(len(STORY)))
    answer = json.loads(result.stdout)
    assert result.stderr == ""
    assert answer["text"] == TOKENIZER.decode(STORY, skip_special_tokens=True)
    assert answer["token_ids"] == STORY
    assert answer["origins"][:3] == ["drafted", "drafted", "recovered"]
    assert (answer["finish_reason"], answer["seed"], answer["draft"]) == ("length", 9, "ngram")
    assert answer["stats"]["tokens_per_round"] == 3.0
    assert answer["stats"]["acceptance_at_depth"] == [1.0, 1.0, 0.0]
    assert (answer["kernels"], answer["format"]) == ("AVX2 kernels", "bfloat16, int8 weights")
    assert (answer["num_threads"], answer["fingerprint"]) == (torch.get_num_threads(), llm.fingerprint)


def test_a_seed_is_drawn_and_reported_where_none_is_given(llm: ScriptedLLM) -> None:
    seeds = {json.loads(generate("x", "--json").stdout)["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert seeds == {params.seed for _, params in llm.received}


def test_interrupting_ends_the_answer_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedLLM(interrupt_at=3)
    load_instead(monkeypatch, lambda options, console: model)
    before = signal.getsignal(signal.SIGINT)
    result = generate("x")
    assert result.exit_code == 130
    assert result.stdout == "Once upon a time, there"
    assert model.closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_one_line_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(options: ModelOptions, console: Console) -> LLM:
        raise ModelNotFound("some/model is neither a folder with [config.json]\nnor " + "x" * 300)

    load_instead(monkeypatch, build)
    for name in ("generate", "chat"):
        message = refusal(name, "--model", "some/model", stdin="", COLUMNS="40")
        assert message == f"error: some/model is neither a folder with [config.json] nor {'x' * 300}\n"


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture
def talking(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    monkeypatch.setattr(llm, "tokenizer", Tokenizer(TOKENIZER._backend, template=ChatTemplate(CHAT, "a test")))
    return llm


def chat(*arguments: str, lines: str) -> Result:
    return command("chat", "--model", "some/model", "--max-tokens", "3", *arguments, stdin=lines)


def prompts_of(llm: ScriptedLLM) -> list[str]:
    return [
        llm.tokenizer.decode([i for i in prompt if isinstance(i, int)], skip_special_tokens=True)
        for prompt, _ in llm.received
    ]


def test_a_conversation_grows_and_is_reset(talking: ScriptedLLM) -> None:
    result = chat("--system", "Be.", lines="hi\n\nand?\n/rset\n/help\n/reset\nagain\n/exit\nnever\n")
    assert result.exit_code == 0
    assert prompts_of(talking) == [
        "<system>Be.\n<user>hi\n<assistant>",
        "<system>Be.\n<user>hi\n<assistant>Once upon a\n<user>and?\n<assistant>",
        "<system>Be.\n<user>again\n<assistant>",
    ]
    assert result.stdout == "Once upon a\n" * 3
    assert "unknown command /rset: /reset clears" in result.stderr
    assert "\n/reset clears the conversation, /exit or Ctrl-D quits\n" in result.stderr, "the answer to /help"
    assert "tokens/s" in result.stderr
    assert chat(lines="hi").exit_code == 0  # the end of input leaves too
    for word in ("/quit", "/bye"):
        assert chat(lines=f"{word}\nnever\n").stdout == ""


def test_only_a_widened_checkpoint_is_named_behind_every_speed(talking: ScriptedLLM) -> None:
    talking.name, talking.draft_name = "some/model", "suffix:some/folder"  # `auto` chose it
    assert "accepted]" in chat("--draft", "auto", lines="hi").stderr
    talking.draft_name = "model:some (widened from 1 M to 2 M parameters)"
    assert "accepted; model:some (widened from 1 M to 2 M parameters)]" in chat(lines="hi").stderr


def test_warnings_stand_behind_a_text_that_is_streamed_and_not_in_it(
    talking: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking.warns = True
    monkeypatch.setattr(logging.getLogger("forerun"), "handlers", [])
    show_warnings()
    for result in (chat(lines="hi"), generate("x", "--max-tokens", "9")):
        assert TOKENIZER.decode(STORY[:3], skip_special_tokens=True) in result.output.split("warning: slow")[0]
        assert result.stdout.strip() in result.output


def test_an_answer_without_a_text_of_a_model_for_conversations_names_chat(
    talking: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "STORY", [2])
    ended = "by the model, without any text: this is a chat model; use `forerun chat`"
    assert ended in generate("x", COLUMNS="200").stderr
    monkeypatch.setattr(talking, "tokenizer", TOKENIZER)
    assert "forerun chat" not in generate("x", COLUMNS="200").stderr


def test_ctrl_c_cancels_the_answer_and_not_the_program(talking: ScriptedLLM) -> None:
    talking.interrupt_at = 3
    result = command("chat", "--model", "m", stdin="hi\nand?\n")
    assert result.exit_code == 0
    assert len(talking.received) == 2
    assert "cancelled" in result.stderr
    assert prompts_of(talking)[1].startswith("<user>hi\n<assistant>Once upon a time, there\n<user>and?")


def test_reasoning_is_shown_apart_and_is_no_part_of_the_conversation(
    talking: ScriptedLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "STORY", TOKENIZER.encode("<think>\nWe look.\n</think>\n\nA dog."))
    thinking = ChatTemplate(CHAT + "{# until </think> #}", "a test")
    monkeypatch.setattr(talking, "tokenizer", Tokenizer(TOKENIZER._backend, template=thinking))
    result = command("chat", "--model", "m", stdin="hi\nand?\n")
    assert result.stdout == "We look.\n\nA dog.\n" * 2
    assert prompts_of(talking)[1] == "<user>hi\n<assistant>A dog.\n<user>and?\n<assistant>"
    painted = command("chat", "--model", "m", stdin="hi\n", FORCE_COLOR="1").stdout
    assert "\x1b[2m" in painted.partition("A")[0]
    assert "\x1b[2m" not in painted.partition("dog")[2]


def test_of_several_channels_only_the_final_one_is_kept() -> None:
    tags = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    form = AnswerForm(begun="<|start|>assistant", special={tag: i for i, tag in enumerate(tags)})
    pieces = [tags[0], "analysis", tags[1], "We ", "look.", tags[2], tags[3], "assistant"]
    pieces += [tags[0], "final", tags[1], "A <|end|>", " dog.", "<|other|>"]
    reply = Reply(form, Painter(Console(file=io.StringIO()), plain=True))
    for piece in pieces:
        reply.add(Segment(piece, Origin.TARGET, special=piece in (*tags, "<|other|>")))
    reply.close()
    assert reply.content == "A <|end|> dog."
    assert reply.painter._console.file.getvalue() == "We look.\n\nA <|end|> dog."  # type: ignore[attr-defined]


def test_a_refused_turn_leaves_no_trace(talking: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}" + CHAT
    monkeypatch.setattr(talking, "tokenizer", Tokenizer(TOKENIZER._backend, template=ChatTemplate(refusing, "t")))
    result = chat(lines="no\nyes\n")
    assert result.exit_code == 0
    assert "error: messages: the chat template refuses them: not that" in result.stderr
    assert prompts_of(talking) == ["<user>yes\n<assistant>"]


def test_chat_without_a_template_says_what_to_do_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.commands.answering.build_llm", lambda *_: 1 / 0)
    message = refusal("chat", "--model", str(TARGET), stdin="hi\n")
    assert f"error: no chat template in {TARGET / 'tokenizer_config.json'}" in message
    assert "chat_template.jinja" in message
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    other = command("chat", "--model", str(TARGET), "--tokenizer", str(tmp_path), stdin="hi\n")
    assert isinstance(other.exception, ZeroDivisionError)


def test_the_real_pair_writes_the_same_text_with_and_without_a_draft() -> None:
    common = ("generate", "-m", str(TARGET), "Once upon a time", "-n", "24", "--seed", "7", "--threads", "1")
    plain = command(*common)
    assert plain.exit_code == 0, plain.stderr
    drafted = command(*common, "--draft", f"model:{SMALL}", "--depth", "4", "--json")
    answer = json.loads(drafted.stdout)
    assert answer["text"] == plain.stdout
    assert (
        TOKENIZER.decode(TOKENIZER.encode("Once upon a time") + answer["token_ids"], skip_special_tokens=True)
        == "Once upon a time" + plain.stdout
    )
    assert answer["stats"]["num_drafted"] > 0
    assert "plain decoding" in plain.stderr
    assert {"drafted"} < set(answer["origins"])
