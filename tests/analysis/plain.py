"""The plain way: full attention matrices of one text at a time, in the model's dtype, from the definitions alone.

Nothing of qbench.analysis or softpick is used: projections are read by hooks, rotated and normalized here.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM


def attention_matrices(model: LlamaForCausalLM, ids: Tensor, kind: str) -> list[Tensor]:
    """A[t, j] of each layer, [heads, T, T], zeros for j > t; computed in float64 whatever the model's dtype."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):
            hooks.append(
                getattr(layer.self_attn, name).register_forward_hook(
                    lambda _, args, out, key=f"{number}{name}": seen.__setitem__(key, out[0].detach().double())
                )
            )
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    dim, length = model.config.head_dim, len(ids)
    turn = rotation(model, length)
    found = []
    for number, layer in enumerate(model.model.layers):
        q, k = seen[f"{number}q_proj"], seen[f"{number}k_proj"]
        if kind == "gated":
            q = q[:, : q.shape[1] // 2]
        q, k = (turn(p.view(length, -1, dim).transpose(0, 1)) for p in (q, k))  # [heads, T, dim]
        k = k.repeat_interleave(len(q) // len(k), 0)
        x = q @ k.mT / dim**0.5
        if kind in ("scaled_softpick", "scalable_softmax"):
            x = (
                x
                * layer.self_attn.s.detach().double()[:, :, None]
                * torch.arange(2, length + 2).double().log()[:, None]
            )
        sinks = layer.self_attn.sinks.detach().double() if kind == "gpt_oss_sink" else None
        found.append(normalized(x, kind, sinks))
    return found


def rotation(model: LlamaForCausalLM, length: int) -> Any:
    """Rotary embeddings with the model's angles, which are float32."""
    probe = torch.zeros(1, length, 1, dtype=model.dtype)
    cos, sin = (t[0].double() for t in model.model.rotary_emb(probe, torch.arange(length)[None]))
    half = cos.shape[-1] // 2
    return lambda x: x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def normalized(x: Tensor, kind: str, sinks: Tensor | None) -> Tensor:
    """The formulas of docs/attention.md, copied literally."""
    seen = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    e = torch.where(seen, x.exp(), 0)
    shifted = torch.where(seen, x.exp() - 1, 0)
    m = torch.where(seen, x, 0).amax(-1, keepdim=True).clamp_min(0)
    total = lambda y: y.sum(-1, keepdim=True)  # noqa: E731
    if kind in ("softmax", "gated", "scalable_softmax"):
        return e / total(e)
    if kind in ("softpick", "scaled_softpick"):
        return shifted.relu() / (total(shifted.abs()) + 1e-6 * m.exp())
    if kind == "relu_softmax":
        return shifted.relu() / (total(shifted.relu()) + 1e-6 * m.exp())
    if kind == "rectified":
        e = torch.where(x >= 0, e, 0)
        return torch.where(total(e) > 0, e / total(e), 0)
    if kind == "softmax_plus_one":
        return e / (1 + total(e))
    if kind == "gpt_oss_sink":
        return e / (sinks[:, None, None].exp() + total(e))
    if kind == "sigmoid":
        n = torch.arange(1, x.shape[-1] + 1).double()[:, None]
        return torch.where(seen, (x - n.log()).sigmoid(), 0)
    raise AssertionError(kind)


def plain(model: LlamaForCausalLM, texts: list[Tensor], kind: str, length: int | None = None) -> dict[str, Any]:
    """Every pooled figure by (metric, setting, part), on the texts cut at a length; shorter ones are left out."""
    dtype = model.dtype
    heads = model.config.num_attention_heads
    texts = [ids[:length] for ids in texts if length is None or len(ids) >= length]
    sinks: dict[tuple[str, float], list[float]] = {}
    sums, zeros, near, pairs, empty, tiles = [], 0, 0, 0, 0, 0
    off = {1e-6: 0, 1e-2: 0}
    values: dict[str, list[np.ndarray]] = {"first": [], "others": []}
    for ids in texts:
        t = len(ids)
        lower = torch.ones(t, t, dtype=torch.bool).tril()
        for a in attention_matrices(model, ids, kind):
            a = a.to(dtype).double()
            rows = a.sum(-1)
            by_sum = torch.where(rows[:, :, None] > 0, a / rows[:, :, None], 0)
            for name, w in (("sink_rate", a), ("sink_rate_normalized", by_sum)):
                for epsilon in (0.2, 0.3):
                    sinks.setdefault((name, epsilon), []).extend((w[:, :, 0].mean(-1) > epsilon).tolist())
            sums.append(rows.flatten())
            zeros += int(((a == 0) & lower).sum())
            near += int(((a <= 1e-5) & lower).sum())
            pairs += heads * int(lower.sum())
            for i in range(0, t, 128):
                for j in range(0, min(i + 128, t), 64):
                    tiles += heads
                    empty += int((a[:, i : i + 128, j : j + 64] == 0).all(-1).all(-1).sum())
        states, outputs = states_and_outputs(model, ids)
        for state in states[:-1]:
            values["first"].append(state[:1].ravel())
            values["others"].append(state[1:].ravel())
        for epsilon in off:
            off[epsilon] = off[epsilon] + (np.abs(outputs).max(-1) < epsilon).sum(1)  # [layers, heads]
    tokens = sum(len(ids) for ids in texts)
    found: dict[Any, float] = {(m, f"{e:g}", "all"): 100 * np.mean(hits) for (m, e), hits in sinks.items()}
    found["row_sum", "", "all"] = float(torch.cat(sums).mean())
    found["sparsity", "", "all"] = 100 * zeros / pairs
    found["sparsity", "1e-05", "all"] = 100 * near / pairs
    found["empty_tiles", "", "all"] = 100 * empty / tiles
    for epsilon, count in off.items():
        found["dead_heads", f"{epsilon:g}", "all"] = 100 * np.mean(count / tokens > 0.95)
        found["mostly_dead_heads", f"{epsilon:g}", "all"] = 100 * np.mean(count / tokens > 0.75)
    joined = {part: np.concatenate(v) for part, v in values.items()}
    joined["all"] = np.concatenate(list(joined.values()))
    for part, x in joined.items():
        centred = x - x.mean()
        found["kurtosis", "", part] = (centred**4).mean() / (centred**2).mean() ** 2
        found["min", "", part], found["max", "", part] = x.min(), x.max()
    return found


def states_and_outputs(model: LlamaForCausalLM, ids: Tensor) -> tuple[list[np.ndarray], np.ndarray]:
    """What `output_hidden_states` returns and the last layer's raw output, [T, hidden] each; and what each head passes
    to o_proj, [layers, T, heads, dim]. All in float64."""
    seen: list[Tensor] = []
    raw: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer in model.model.layers
    ]
    hooks.append(model.model.layers[-1].register_forward_hook(lambda _, args, out: raw.append(out[0])))
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    heads = torch.stack(seen).double().unflatten(-1, (model.config.num_attention_heads, -1))
    return [state[0].double().numpy() for state in states] + [raw[0].double().numpy()], heads.numpy()
