"""Random numbers as a pure function of what they are for: no generator state exists.

A *stream* is named by integers: (run seed, purpose, layer, sample, …) or (run seed, purpose, weight name, row). Its
words are random access: word `i` of a stream is the same on every device, rank and layout, alone or in a batch of
millions.

    stream name ──mix64──▶ (offset, gamma) 32 bits each ──▶ word i = mix32(offset + i·gamma)       gamma is odd

That is SplitMix (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) in 32 bits: a Weyl
sequence of its own for every stream, finished by a bijective mixing function. Only integer multiplication, shift and
exclusive or are used on words, and only correctly rounded +, −, ×, ÷ and √ on floats, so that CPU and CUDA give equal
bits.
"""

from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from colonnade.upload import upload


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every run's identity: never reuse or change one."""

    INITIAL_WEIGHT = 1
    EMBEDDING_DROPOUT = 2
    ATTENTION_DROPOUT = 3
    RESIDUAL_DROPOUT = 4
    SAMPLING = 5
    INNER_DROPOUT = 6
    FINAL_DROPOUT = 7
    ADAPTER_DROPOUT = 8
    POOLED_DROPOUT = 9


_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15


def name_id(name: str) -> int:
    """A 64-bit number for a name, the same in every process and Python version."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def stream_keys(*name: int, last: Sequence[int] | np.ndarray | range) -> np.ndarray:
    """Keys of the streams (*name, i) for every i in `last`: uint64 [len(last)]."""
    key = 0
    for part in name:
        key = _mix64_int((key + _GOLDEN64 * ((part & _MASK64) + 1)) & _MASK64)
    with np.errstate(over="ignore"):
        ids = np.asarray(last).astype(np.uint64)
        return _mix64(np.uint64(key) + np.uint64(_GOLDEN64) * (ids + np.uint64(1)))


def words(keys: np.ndarray, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Words `start … start + count` of every stream: int32 [len(keys), count], all 2³² values alike likely.

    A stream has 2³² words; `start + count` may not pass that.
    """
    check_range(start, count)
    offset, gamma = upload(torch.from_numpy(np.stack(offset_and_gamma(keys, start))), device)[..., None]
    x = torch.arange(count, dtype=torch.int32, device=device)[None, :] * gamma
    return _mix32_(x.add_(offset))


def check_range(start: int, count: int) -> None:
    """What may be asked for of a stream's words."""
    assert start + count <= 1 << 32, "a stream has 2^32 words; name more streams"
    assert count <= 1 << 31, f"{count} words of a stream at once: int32 counts to 2^31"


def words_of(start: int, count: int) -> tuple[int, int]:
    """(first, how many) of the words that have elements `start … start + count` of 16 bits, two to a word."""
    first = start // 2
    number = (start + count + 1) // 2 - first
    check_range(first, number)
    return first, number


def uniform_16bit(keys: np.ndarray, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Elements `start … start + count` of every stream, two to a word: int16 [len(keys), count], uniform on all 2¹⁶
    values.
    """
    first, number = words_of(start, count)
    halves = words(keys, first, number, device).view(torch.int16)
    return halves[:, start - 2 * first : start - 2 * first + count]


def uniform(keys: np.ndarray, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Elements `start … start + count` of every stream: float64 [len(keys), count], uniform in (0, 1), 52 random bits
    each.
    """
    pairs = words(keys, 2 * start, 2 * count, device).view(len(keys), count, 2).to(torch.float64)
    high, low = pairs[..., 0] + 2.0**31, pairs[..., 1] + 2.0**31  # integers in [0, 2^32)
    return (high * 2.0**20 + (low * 2.0**-12).floor() + 0.5) * 2.0**-52


def keep_mask(keys: np.ndarray, start: int, count: int, drop: float, device: torch.device | str = "cpu") -> Tensor:
    """True where an element is kept: bool [len(keys), count]. The chance of False is `drop_probability(drop)`."""
    return uniform_16bit(keys, start, count, device) >= least_kept(drop)


def dropped_values(drop: float) -> int:
    """How many of the 2¹⁶ values of an element mean that it is dropped, the least of them all; never every one."""
    return min(round(drop * 65536), 65535)


def least_kept(drop: float) -> int:
    """The least element that is kept, as an integer of 16 bits with a sign."""
    return dropped_values(drop) - 32768


def drop_probability(drop: float) -> float:
    """`drop` as masks realise it: rounded to a multiple of 2⁻¹⁶ below 1. Scale what is kept by 1 / (1 − this)."""
    return dropped_values(drop) / 65536


def kept_scale(drop: float) -> float:
    """What is kept is multiplied with this, so that the mean stays."""
    return 1.0 / (1.0 - drop_probability(drop))


def normal(keys: np.ndarray, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Elements of every stream as N(0, 1): float64 [len(keys), count], by inversion of the distribution function.

    Source of the rational approximations: Wichura, Algorithm AS 241 (PPND16), Applied Statistics 37 (1988).
    """
    q = uniform(keys, start, count, device) - 0.5
    r = 0.180625 - q * q
    centre, near, far = NORMAL_RATIOS
    z = q * _ratio(r, *centre)
    tail = r < 0
    t = q[tail]
    r = _exact_root(-_exact_log(0.5 - t.abs()))
    z[tail] = torch.where(r <= 5.0, _ratio(r - 1.6, *near), _ratio(r - 5.0, *far)) * t.sign()
    return z


# --- words -----------------------------------------------------------------------------------------------------------


def _mix64_int(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finishing function on uint64, the same as `_mix64_int` on each element."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def offset_and_gamma(keys: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [len(keys)] each: where a stream's Weyl sequence stands at word `start`, and its odd step."""
    with np.errstate(over="ignore"):
        gamma = (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        flips = np.bitwise_count(gamma ^ (gamma >> np.uint32(1)))
        gamma = np.where(
            flips < 12, gamma ^ np.uint32(0xAAAAAAAA), gamma
        )  # steps with few bit changes mix badly (SplitMix, 5)
        offset = keys.astype(np.uint32) + gamma * np.uint32(start & 0xFFFFFFFF)
    return offset.view(np.int32), gamma.view(np.int32)


def _mix32_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit moves every output bit with a chance near one half; in
    place.

    Constants: C. Wellons, "Prospecting for hash functions" (2018), the two-multiplication function of least bias.
    """
    scratch = torch.empty_like(x)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))  # int32 shifts copy the sign: mask it off
        if factor is not None:
            x.mul_(factor)
    return x


# --- floats, by correctly rounded operations alone
# -----------------------------------------------------------------------


def _exact_log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 to 1e-16, by +, −, ×, ÷ only: library logarithms differ in the last bit."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = torch.where(low, mantissa * 2.0, mantissa), torch.where(low, exponent - 1, exponent)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(z * z, [1.0 / (2 * k + 1) for k in range(12)])
    return z * 2.0 * series + exponent.to(torch.float64) * 0.6931471805599453


def _exact_root(x: Tensor) -> Tensor:
    """√x of float64. On CPUs by numpy: torch takes MKL's, of which one in a hundred differs in its last bit."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """c₀ + c₁x + c₂x² + …, a multiplication and an addition at a time (never fused, so that all devices round
    alike).
    """
    result = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result.mul_(x).add_(c)
    return result


def _ratio(x: Tensor, numerator: Sequence[float], denominator: Sequence[float]) -> Tensor:
    return _polynomial(x, numerator) / _polynomial(x, denominator)


# fmt: off
_CENTRE_NUMERATOR = (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
                     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3)
_CENTRE_DENOMINATOR = (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
                       2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4,
                       5.2264952788528545610e3)
_NEAR_NUMERATOR = (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
3.64784832476320460504e0,
                   1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2,
                   7.74545014278341407640e-4)
_NEAR_DENOMINATOR = (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
                     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
                     1.05075007164441684324e-9)
_FAR_NUMERATOR = (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
2.96560571828504891230e-1,
                  2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5,
                  2.01033439929228813265e-7)
_FAR_DENOMINATOR = (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
                    7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
                    2.04426310338993978564e-15)
NORMAL_RATIOS = ((_CENTRE_NUMERATOR, _CENTRE_DENOMINATOR), (_NEAR_NUMERATOR, _NEAR_DENOMINATOR),
                 (_FAR_NUMERATOR, _FAR_DENOMINATOR))
# fmt: on
