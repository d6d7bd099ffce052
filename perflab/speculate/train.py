"""Training a draft head on what `collect` gathered: unrolled over a chain of drafts, with checkpoints.

Owns the loss, the schedule, held-out acceptance and the state that an interrupted training goes on from.
Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from perflab.clock import WallClock
from perflab.config import check_types
from perflab.errors import ConfigError, StoreError
from perflab.models.loaded import LoadedModel
from perflab.speculate.examples import Batch, Set, Target, frequent_tokens, make_batch, rms
from perflab.speculate.head_module import DraftHead, HeadModule, HeadShape, Past

STATE = "state.safetensors"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a head is trained.

    vocabulary: frequent tokens that it can draft. unroll: drafts of a chain in training; the loss of
    each counts `decay` of the one before. batch_tokens: of one optimizer step, padding included.
    epochs: passes over the data; `minutes` ends training earlier, the learning rate falls to zero by
    whichever comes first. prompt_weight: weight of positions before the answer, 1 inside it.
    feature_weight: of the smooth L1 distance of features beside the cross entropy.
    held_out: share of shards, from the last, that only tests see; at least one.
    Raises ConfigError naming the value.
    """

    vocabulary: int = 4096
    unroll: int = 3
    decay: float = 0.8
    batch_tokens: int = 2048
    epochs: float = 4.0
    minutes: float | None = None
    learning_rate: float = 3e-3
    warm_up: int = 50
    weight_decay: float = 0.01
    prompt_weight: float = 0.3
    feature_weight: float = 1.0
    held_out: float = 0.04
    evaluate_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
        for name in ("vocabulary", "unroll", "batch_tokens", "epochs", "learning_rate", "evaluate_every"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")


def guesses(module: HeadModule, batch: Batch, scale: float, unroll: int, autocast: bool) -> Iterator[Tensor]:
    """The guessed features [B, T, hidden] of each draft of the chains, the first draft's first."""
    past: Past = []
    feature = batch.feature
    for _ in range(unroll):
        with torch.autocast(batch.feature.device.type, torch.bfloat16, enabled=autocast):
            guess = module.unrolled(feature, batch.embedding, past)
        yield guess
        feature = _shift(guess * scale, batch.feature)


def _shift(guess: Tensor, true: Tensor) -> Tensor:
    """The guess of position t's feature stands at t - 1; the first position has only the true one."""
    return torch.cat((true[:, :1].to(guess.dtype), guess[:, :-1]), 1)


def loss_of(
    module: HeadModule, batch: Batch, target: Target, scale: float, config: TrainConfig, autocast: bool
) -> Tensor:
    """Cross entropy against the target's distribution over the draft vocabulary, and feature distance."""
    kept = batch.weight > 0
    weight = batch.weight[kept]
    weight = weight / weight.sum()
    wanted = batch.wanted[kept]
    with torch.no_grad(), torch.autocast(wanted.device.type, torch.bfloat16, enabled=autocast):
        goal = functional.linear(wanted, target.rows).float().softmax(-1)
    total = torch.zeros((), device=wanted.device)
    factor = 1.0
    for guess in guesses(module, batch, scale, config.unroll, autocast):
        own = guess[kept]
        with torch.autocast(wanted.device.type, torch.bfloat16, enabled=autocast):
            logits = functional.linear(own, target.rows)
        entropy = functional.cross_entropy(logits.float(), goal, reduction="none")
        distance = functional.smooth_l1_loss(own.float() * scale, wanted * scale, reduction="none").mean(-1)
        total = total + factor * (weight * (entropy + config.feature_weight * distance)).sum()
        factor *= config.decay
    return total


@dataclass(slots=True)
class Acceptance:
    """Held-out drafts: `reached[s]` chains came to draft s, `accepted[s]` of them had it right.

    A draft is right where it is the token that the target went on with.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Conditional acceptance of each draft of a chain."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def length(self) -> float:
        """Mean accepted drafts of a chain."""
        return sum(self.accepted) / self.reached[0] if self.reached and self.reached[0] else 0.0


@torch.inference_mode()
def evaluate(
    module: HeadModule, data: Set, target: Target, scale: float, depth: int = 5, tokens: int = 4096
) -> Acceptance:
    """Chains of `depth` drafts from every position of the answers."""
    result = Acceptance([0] * depth, [0] * depth)
    for indices in data.batches(tokens, "held out"):
        batch = make_batch(data, indices, target, scale, 0.0)
        alive = batch.answer
        for step, guess in enumerate(guesses(module, batch, scale, depth, autocast=False)):
            if step:  # a chain's next draft stands one further
                alive = functional.pad(alive[:, :-1], (1, 0)) & batch.answer
            at = alive.nonzero(as_tuple=True)
            best = functional.linear(guess[at].float(), target.rows).argmax(-1)
            right = torch.zeros_like(alive)
            right[at] = best == batch.token[at]
            result.reached[step] += int(alive.sum())
            result.accepted[step] += int(right.sum())
            alive = right
    return result


class Trainer:
    """One training in one folder. `run` goes on from the folder's checkpoint where there is one."""

    def __init__(
        self,
        model: LoadedModel,
        shards: Sequence[Path],
        folder: Path,
        config: TrainConfig,
        progress: Callable[[str], None] = lambda message: None,
        start: HeadModule | None = None,
    ) -> None:
        if len(shards) < 2:
            raise ConfigError(
                f"{len(shards)} shards: two are needed, one of them to test; collect more tokens"
            )
        self.folder, self.config, self.say = folder, config, progress
        self.made_for = {"model": model.name.split("/")[-1], "fingerprint": model.fingerprint}
        held = max(1, round(config.held_out * len(shards)))
        self.data, self.test = Set.read(shards[:-held]), Set.read(shards[-held:])
        module: Any = model.module
        vocabulary = min(config.vocabulary, module.get_output_embeddings().weight.shape[0])
        self.token_ids, self.coverage = frequent_tokens(self.data, vocabulary, model.stop_token_ids)
        self.target = Target(model, self.token_ids)
        some = torch.cat([features[:64] for _, features, _ in self.data.examples[:256]]).float()
        self.scale = 1 / rms(some)
        torch.manual_seed(config.seed)
        shape = HeadShape.like(model, len(self.token_ids))
        size = some.square().mean(0).sqrt()
        self.module = (start or initial(shape, size, module)).to(model.device).train()
        self.autocast = model.device.type == "cuda" or _bf16_pays(model.device)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=config.weight_decay
        )
        self.step = 0
        self.spent_s = 0.0
        self.best = 0.0
        self.log: list[dict[str, Any]] = []
        self._resume()

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.batches(self.config.batch_tokens, "count"))

    def run(self) -> Path:
        """Train to the end; returns the file of the best head by mean accepted drafts on held-out text."""
        config, clock = self.config, WallClock()
        total = max(1, round(config.epochs * self.steps_per_epoch))
        started, before = clock.now(), self.spent_s
        done = self.step >= total
        running: list[float] = []
        while not done:
            epoch, at = divmod(self.step, self.steps_per_epoch)
            for indices in self.data.batches(config.batch_tokens, f"{config.seed}/{epoch}")[at:]:
                share = max(self.step / total, self.spent_s / 60 / config.minutes if config.minutes else 0)
                running.append(self._train(indices, share))
                self.spent_s = before + (clock.now() - started) / 1e9
                self.step += 1
                done = self.step >= total or bool(config.minutes and self.spent_s >= 60 * config.minutes)
                if done or self.step % config.evaluate_every == 0:
                    self._checkpoint(sum(running) / len(running), total)
                    running.clear()
                if done:
                    break
        return self.folder / "head.safetensors"

    def _train(self, indices: list[int], share: float) -> float:
        config = self.config
        rate = config.learning_rate * min(1.0, (self.step + 1) / config.warm_up) * max(0.02, 1 - share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = make_batch(self.data, indices, self.target, self.scale, config.prompt_weight)
        loss = loss_of(self.module, batch, self.target, self.scale, config, self.autocast)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _checkpoint(self, loss: float, total: int) -> None:
        found = evaluate(self.module, self.test, self.target, self.scale)
        rates = " ".join(f"{rate:.3f}" for rate in found.rates)
        self.say(
            f"step {self.step} of {total}, {self.spent_s / 60:.1f} min: loss {loss:.4f}, "
            f"held-out acceptance by position {rates}, {found.length:.3f} of 5 drafts"
        )
        self.log.append({"step": self.step, "loss": loss, "rates": found.rates, "length": found.length})
        if found.length >= self.best:
            self.best = found.length
            self.head(found).save(self.folder / "head.safetensors")
        self._save_state()

    def head(self, found: Acceptance) -> DraftHead:
        """The head with the scales of its inputs inside its weights."""
        module = HeadModule(self.module.shape)
        weights = {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}
        hidden = module.shape.hidden
        weights["fc.weight"][:, :hidden] *= self.scale
        weights["fc.weight"][:, hidden:] /= self.target.embed_scale
        module.load_state_dict(weights)
        meta = {
            **self.made_for,
            "made_with": "perflab train-drafter",
            "training": asdict(self.config),
            "conversations": len(self.data.examples),
            "tokens": sum(len(tokens) for tokens, _, _ in self.data.examples),
            "steps": self.step,
            "minutes": round(self.spent_s / 60, 1),
            "vocabulary_covers": round(self.coverage, 4),
            "held_out_acceptance": [round(rate, 4) for rate in found.rates],
        }
        return DraftHead(module, self.token_ids, meta)

    def _save_state(self) -> None:
        arrays: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state[parameter]
            arrays[f"weight.{name}"] = parameter.detach()
            arrays |= {f"{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step")}
        facts = {
            "config": asdict(self.config),
            "step": self.step,
            "spent_s": self.spent_s,
            "best": self.best,
            "log": self.log,
            "tokens": len(self.token_ids),
        }
        draft = self.folder / "state.draft"
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in arrays.items()}, draft, {"perflab": json.dumps(facts)})
        draft.rename(self.folder / STATE)

    def _resume(self) -> None:
        path = self.folder / STATE
        if not path.exists():
            return
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["perflab"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["tokens"] != len(self.token_ids):
            raise StoreError(f"{path} is of a training with {facts['tokens']} tokens: choose another folder")
        for name, parameter in self.module.named_parameters():
            parameter.data.copy_(arrays[f"weight.{name}"])
            self.optimizer.state[parameter] = {
                key: arrays[f"{key}.{name}"].to(parameter.device if key != "step" else "cpu")
                for key in ("exp_avg", "exp_avg_sq", "step")
            }
        self.step, self.spent_s = facts["step"], facts["spent_s"]
        self.best, self.log = facts["best"], facts["log"]
        self.say(f"going on from step {self.step}")


def initial(shape: HeadShape, size: Tensor, target: Any = None) -> HeadModule:
    """The fc as the sum of its two inputs; the layer as the target's last one where it has Llama's names and
    these sizes, else random; the final norm at the features' size [hidden]."""
    module = HeadModule(shape)
    for parameter in module.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        for half in module.fc.weight.split(shape.hidden, 1):
            half += torch.eye(shape.hidden)
        module.final_norm.copy_(size)
        for name, value in _last_layer(target).items():
            own = module.get_parameter(name)
            if own.shape == value.shape:
                own.copy_(value)
    return module


def _last_layer(target: Any) -> dict[str, Tensor]:
    """Weights of the target's last layer by the names of `HeadModule`; none where it has other names."""
    try:
        layer = target.model.layers[-1]
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "qkv.weight": [attention.q_proj, attention.k_proj, attention.v_proj],
            "out.weight": [attention.o_proj],
            "gate_up.weight": [mlp.gate_proj, mlp.up_proj],
            "down.weight": [mlp.down_proj],
            "input_norm": [layer.input_layernorm],
            "post_norm": [layer.post_attention_layernorm],
        }
    except (AttributeError, TypeError, IndexError):
        return {}
    return {name: torch.cat([linear.weight.detach() for linear in side]) for name, side in parts.items()}


def _bf16_pays(device: torch.device) -> bool:
    from perflab.models.load import runs_bf16_fast

    return runs_bf16_fast(device)
