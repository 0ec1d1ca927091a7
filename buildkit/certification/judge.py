"""Turns measurements of an image into the parts of a certificate."""

from collections.abc import Mapping, Sequence
from typing import Any

from buildkit.certification.certificate import FAILED, NOT_DONE, PASSED, Part

ROUNDING = 0.02
"""Largest mean difference between the log-probs of engine and trainer that bfloat16 explains, in nats."""
QUANTITIES = {
    "matrix": "matrix_tflops",
    "memory": "memory_gb_s",
    "to_device": "to_device_gb_s",
    "to_host": "to_host_gb_s",
}
DEVICES, COLLECTIVES = "devices", "collectives"
TWO_RANKS, AGREEMENT, WEIGHT_SYNC, SLEEP = "two ranks", "agreement", "weight sync", "sleep and wake"
TRAINING = (TWO_RANKS, AGREEMENT, WEIGHT_SYNC, SLEEP)


def failed(names: Sequence[str], reason: str) -> list[Part]:
    return [Part(name, FAILED, reason) for name in names]


def judge_devices(measured: Mapping[str, Any], gpus: bool) -> list[Part]:
    """Parts of `launch preflight --speed`'s report. A figure is that of the slowest device."""
    devices = measured["devices"]
    sheet = measured.get("data_sheets", {}).get(devices[0]["name"])
    figures = {name: min(device[key] for device in devices) for key, name in QUANTITIES.items() if devices[0][key]}
    if sheet:
        figures |= {f"data_sheet_{QUANTITIES[key]}": sheet[key] for key in ("matrix", "memory")}
    problems = [text for kind in ("slow", "health") for texts in measured[kind].values() for text in texts]
    if problems:
        speed = Part(DEVICES, FAILED, "; ".join(problems), figures)
    elif not sheet:
        name = devices[0]["name"] if gpus else "CPUs"
        speed = Part(DEVICES, NOT_DONE, f"measured, but no data sheet of {name} is known", figures)
    else:
        speed = Part(DEVICES, PASSED, "", figures)
    return [speed, judge_collectives(devices, sheet)]


def judge_collectives(devices: Sequence[Mapping[str, Any]], sheet: Mapping[str, Any] | None) -> Part:
    """The bus bandwidth of a sum over all devices. Data sheets name an upper limit, which two GPUs without a switch
    do not reach, so it is shown and not required."""
    if len(devices) < 2:
        return Part(COLLECTIVES, NOT_DONE, "the machine has a single device")
    figures = {"bus_gb_s": min(device["between"] for device in devices)}
    if sheet and sheet.get("link"):
        figures["data_sheet_bus_gb_s"] = sheet["link"]
    return Part(COLLECTIVES, PASSED if figures["bus_gb_s"] > 0 else FAILED, "", figures)


def judge_training(rows: Sequence[Mapping[str, float]], steps: int, ranks: int, gpus: bool) -> list[Part]:
    """Parts of a PPO run with these metrics, a row per step."""
    if len(rows) < steps:
        return failed(TRAINING, f"the run ended after {len(rows)} of {steps} steps")
    return [judge_ranks(rows, ranks), judge_agreement(rows), judge_weights(rows), judge_sleep(rows, gpus)]


def judge_ranks(rows: Sequence[Mapping[str, float]], ranks: int) -> Part:
    figures = {
        "ranks": ranks,
        "steps": len(rows),
        "step_seconds": rows[-1]["time/step"],
        "tokens_per_second": rows[-1]["throughput/tokens_per_second"],
    }
    if ranks < 2:
        return Part(TWO_RANKS, NOT_DONE, "the machine has a single GPU; the run used it alone", figures)
    return Part(TWO_RANKS, PASSED, "", figures)


def judge_agreement(rows: Sequence[Mapping[str, float]]) -> Part:
    mean = max(row["rollout/log_prob_difference_mean"] for row in rows)
    figures = {"mean_nats": mean, "largest_nats": max(row["rollout/log_prob_difference"] for row in rows)}
    if mean < ROUNDING:
        return Part(AGREEMENT, PASSED, "", figures)
    return Part(AGREEMENT, FAILED, f"log-probs of engine and trainer differ by {mean:.4g} nats on average", figures)


def judge_weights(rows: Sequence[Mapping[str, float]]) -> Part:
    """An engine that missed an update would be as far from the actor as the reference is."""
    figures = {
        "seconds": max(row["time/sync_weights"] for row in rows),
        "bytes": max(row["rollout/synced_bytes"] for row in rows),
        "distance_to_reference_nats": min(abs(row["reference/kl"]) for row in rows[1:]),
    }
    apart = max(row["rollout/log_prob_difference_mean"] for row in rows[1:])
    if figures["bytes"] <= 0:
        return Part(WEIGHT_SYNC, FAILED, "no weights were sent", figures)
    if figures["distance_to_reference_nats"] <= 2 * apart:
        return Part(WEIGHT_SYNC, FAILED, "the engines are as far from the actor as from its starting point", figures)
    return Part(WEIGHT_SYNC, PASSED, "", figures)


def judge_sleep(rows: Sequence[Mapping[str, float]], gpus: bool) -> Part:
    """Engines that sampled in the step after they slept have woken."""
    if not gpus:
        return Part(SLEEP, NOT_DONE, "engines sleep only on GPUs")
    if any("time/sleep" not in row for row in rows):
        return Part(SLEEP, FAILED, "the engines did not leave the GPU during training")
    return Part(SLEEP, PASSED, "", {"seconds": max(row["time/sleep"] for row in rows)})
