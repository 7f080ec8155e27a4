"""How large messages are and how fast they are written and read: ratios measured side by side in one run.

    python benchmarks/wire.py                      a ResNet-18 (11.2 million weights), a few minutes
    python benchmarks/wire.py --parameters 1200000 --json

One message with random weights under a random mask, in six ways: ``copy``, the weights as plain bytes and back, without
frame or checksum; ``dense``; ``COO``, a 32-bit index beside each value; ``bitmask``, a bit per weight and the values;
``first``, what FedStrata sends when it sends the mask too; ``held``, what it sends when the receiver holds the mask.
All but ``copy`` have the same frame and checksum. Supports of masks (:mod:`fedstrata.wire.support`) are forgotten
before each measurement, except with ``held``, where they are known from the message before, as they are in a run.

Speeds are MB (10^6 bytes) per second of processor time on one core, the fastest of alternating repetitions: of all the
fp32 weights that go in and come out or, in the last column, of the bytes that travel.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import fedstrata  # noqa: F401 - sets the environment before torch is imported

import numpy as np  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip

from fedstrata.methods.contract.views import Message
from fedstrata.wire import bytes_by_encoding, decode, encode
from fedstrata.wire.frame import Reader, seal, unseal
from fedstrata.wire.masks import unpack_bits
from fedstrata.wire.support import SUPPORTS, support_of
from fedstrata.wire.values import read_numbers, tensor_of, write_values

Result = TypeVar("Result")
SPARSITIES = (0.5, 0.9, 0.95, 0.99)
NAME = "weight"
HELD = "held"


@dataclass(frozen=True)
class Way:
    """One way to send the weights."""

    name: str
    write: Callable[[], bytes]
    read: Callable[[bytes], Tensor]

    def prepare(self) -> None:
        """Leave the supports that this way would find."""
        SUPPORTS.clear()
        if self.name == HELD:
            self.read(self.write())


@dataclass(frozen=True)
class Measurement:
    """What one way costs."""

    sparsity: float
    way: str
    bytes: int
    of_dense: float
    of_ideal: float
    encode_weights: float
    decode_weights: float
    both_weights: float
    both_wire: float


def ways(weights: Tensor, mask: Tensor) -> list[Way]:
    """List the ways to send weights under a mask."""
    message, held, shape = Message({NAME: weights}, {NAME: mask}), {NAME: mask.clone()}, weights.shape
    fp32 = torch.float32

    def write_coordinates() -> bytes:
        positions = np.flatnonzero(mask.numpy()).astype(np.uint32)
        return seal(b"", [positions.view(np.uint8).data, *write_values(weights, support_of(mask), fp32)], None)

    def read_coordinates(data: bytes) -> Tensor:
        _, reader = unseal(data, None, 0)
        count = (len(data) - 16) // 8
        positions = reader.take(4 * count).view(np.uint32)
        dense = np.zeros(weights.numel(), dtype=np.int32)
        dense[positions] = read_numbers(reader, count, fp32, fp32)
        return torch.from_numpy(dense).view(fp32).reshape(shape)

    def write_bitmask() -> bytes:
        support = support_of(mask)
        return seal(b"", [support.bits.data, *write_values(weights, support, fp32)], None)

    def read_bitmask(data: bytes) -> Tensor:
        reader: Reader
        _, reader = unseal(data, None, 0)
        support = SUPPORTS.find(unpack_bits(reader, mask.numel()).reshape(shape))
        return tensor_of(read_numbers(reader, support.count, fp32, fp32), fp32, shape, support)

    def read_copy(data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy()).reshape(shape)

    return [
        Way("copy", lambda: weights.numpy().tobytes(), read_copy),
        Way("dense", lambda: encode(Message(message.tensors)), lambda data: decode(data).tensors[NAME]),
        Way("COO", write_coordinates, read_coordinates),
        Way("bitmask", write_bitmask, read_bitmask),
        Way("first", lambda: encode(message), lambda data: decode(data).tensors[NAME]),
        Way(HELD, lambda: encode(message, held), lambda data: decode(data, held=held).tensors[NAME]),
    ]


def timed(task: Callable[[], Result]) -> tuple[Result, float]:
    """Return what a task returns, and its seconds of processor time."""
    begin = time.process_time()
    result = task()
    return result, time.process_time() - begin


def measure(parameters: int, sparsity: float, repetitions: int) -> list[Measurement]:
    """Measure all ways in turn, again and again."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, parameters, generator=generator)
    mask = torch.rand(1, parameters, generator=generator) >= sparsity
    kept = int(mask.sum())
    entropy = sum(-share * math.log2(share) for share in (kept / parameters, 1 - kept / parameters)) * parameters / 8
    ideals = {"copy": 4 * parameters, "dense": 4 * parameters, HELD: 4 * kept}
    candidates = ways(weights, mask)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(repetitions):
        for way in candidates:
            way.prepare()
            data, encoding = timed(way.write)
            way.prepare()
            received, decoding = timed(partial(way.read, data))
            seconds.setdefault((way.name, "encode"), []).append(encoding)
            seconds.setdefault((way.name, "decode"), []).append(decoding)
            assert torch.equal(received, weights if way.name in ("copy", "dense") else weights * mask)
            del data, received

    sizes, dense = bytes_by_encoding(Message({NAME: weights}, {NAME: mask})), 4 * parameters

    def result(way: Way) -> Measurement:
        size = sizes.get(way.name, dense)
        encoding, decoding = (min(seconds[way.name, task]) for task in ("encode", "decode"))
        return Measurement(
            sparsity,
            way.name,
            bytes=size,
            of_dense=size / dense,
            of_ideal=size / ideals.get(way.name, 4 * kept + entropy),
            encode_weights=dense / 1e6 / encoding,
            decode_weights=dense / 1e6 / decoding,
            both_weights=dense / 1e6 / (encoding + decoding),
            both_wire=size / 1e6 / (encoding + decoding),
        )

    return [result(way) for way in candidates]


def table(measurements: list[Measurement]) -> str:
    """Lay the numbers out as Markdown."""
    lines = [
        "| sparsity | way | bytes | % of dense | times ideal | encode | decode | both | both, wire |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines.extend(
        f"| {one.sparsity:.0%} | {one.way} | {one.bytes:,} | {one.of_dense:.2%} | {one.of_ideal:.4f} "
        f"| {one.encode_weights:.0f} | {one.decode_weights:.0f} | {one.both_weights:.0f} | {one.both_wire:.0f} |"
        for one in measurements
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", type=int, default=11_173_962, help="weights in the message")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measurements = [
        one for sparsity in SPARSITIES for one in measure(arguments.parameters, sparsity, arguments.repetitions)
    ]
    if arguments.json:
        print(json.dumps({"parameters": arguments.parameters, "rows": [asdict(one) for one in measurements]}))
    else:
        print(f"{arguments.parameters:,} weights; PyTorch {torch.__version__}, NumPy {np.__version__}\n")
        print(table(measurements))


if __name__ == "__main__":
    main()
