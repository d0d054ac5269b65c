"""Known devices, as data: each figure with the document that gives it, or with how it was derived.

Rates are dense (without sparsity), with sums in float32. On NVIDIA "float32" is what the ordinary cores do, for tensor
cores have no float32; "float64" is that of the tensor cores where they have one.
"""

from __future__ import annotations

import torch

from onchip.model.hardware import Figure, Hardware, device_name, measured_path, read_measured

FLOPS, BYTES, RATE = "FLOP/s", "B/s", "1/s"
GUIDE = "CUDA C++ Programming Guide, Arithmetic Instructions, table of throughputs: 16 exponentials a clock on each SM"
LUO = "Luo et al. 2024, Benchmarking and Dissecting the Nvidia Hopper GPU Architecture (arXiv 2402.13499), table V"
ZADOURI = "Zadouri et al. 2026, FlashAttention-4 (arXiv 2603.05451), section 2, hardware characteristics"
BANKS = "CUDA C++ Programming Guide, Shared Memory: 32 banks of 4 bytes a clock on each SM"
CAPABILITIES = "CUDA C++ Programming Guide, Compute Capabilities, table of technical specifications"
AMPERE = "NVIDIA A100 Tensor Core GPU Architecture white paper"
HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"
CDNA3 = "AMD CDNA 3 Architecture white paper"
LAUNCH = Figure(
    0.5e-6,
    "s",
    "derived: kernels of 2.9 us follow each other every 3.4 us in a CUDA graph on a V100 (Gray 2019, Getting Started "
    "with CUDA Graphs, NVIDIA Technical Blog); eager launches take longer",
)


def _nvidia(
    name: str,
    architecture: str,
    *,
    multiprocessors: Figure,
    clock: Figure,
    products: dict[str, Figure],
    device_memory: Figure,
    cache_size: Figure,
    cache: Figure | None,
    on_chip_size: Figure,
) -> Hardware:
    """An NVIDIA GPU: exponentials and shared memory follow from its multiprocessors and its clock."""
    cycles = multiprocessors.value * clock.value
    return Hardware(
        name=name,
        device_type="cuda",
        architecture=architecture,
        processors=multiprocessors,
        clock=clock,
        products=products,
        exponentials=Figure(16 * cycles, RATE, f"derived: {GUIDE}, times SMs and clock"),
        device_memory=device_memory,
        cache_size=cache_size,
        cache=cache,
        on_chip=Figure(128 * cycles, BYTES, f"derived: {BANKS}, times SMs and clock"),
        on_chip_size=on_chip_size,
        launch=LAUNCH,
    )


def _products(source: str, **rates: float) -> dict[str, Figure]:
    """Figures in 10^12 operations a second."""
    return {precision: Figure(rate * 1e12, FLOPS, source) for precision, rate in rates.items()}


_A100 = _nvidia(
    "NVIDIA A100 80GB SXM",
    "sm_80",
    multiprocessors=Figure(108, "SMs", f"{AMPERE}, table 4"),
    clock=Figure(1.410e9, "Hz", f"{AMPERE}, table 4, GPU boost clock"),
    products=_products(f"{AMPERE}, table 4", float16=312, bfloat16=312, tf32=156, float32=19.5, float64=19.5),
    device_memory=Figure(2.039e12, BYTES, "NVIDIA A100 data sheet, A100 80GB SXM"),
    cache_size=Figure(40 * 2**20, "B", f"{AMPERE}, table 4"),
    cache=Figure(5120 * 1.410e9, BYTES, f"derived: {AMPERE}, section on the L2 cache: 5120 bytes a clock, times clock"),
    on_chip_size=Figure(164 * 2**10, "B", f"{AMPERE}, table 5"),
)

_HOPPER_CLOCK = Figure(
    989.4e12 / (132 * 4096),
    "Hz",
    "derived: 989.4 TFLOPS over 132 SMs of 4096 operations a clock; Shah et al. 2024, FlashAttention-3 (arXiv "
    "2407.08608), section 3.1, say 1830 MHz",
)
_HOPPER_PRODUCTS = _products(
    f"{HOPPER}, table of H100 SXM5, without sparsity; the same chip is in the H200",
    float16=989.4,
    bfloat16=989.4,
    tf32=494.7,
    float32=66.9,
    float64=66.9,
)


def _hopper_cache(slices: int) -> Figure:
    source = (
        f"derived: {slices} slices of 64 bytes a clock, as many for each memory controller as the A100 has ({AMPERE}, "
        f"section on the L2 cache), times clock; not published. {LUO} measure 4472 bytes a clock on an H800 PCIe"
    )
    return Figure(slices * 64 * _HOPPER_CLOCK.value, BYTES, source)


_H100 = _nvidia(
    "NVIDIA H100 SXM",
    "sm_90",
    multiprocessors=Figure(132, "SMs", f"{HOPPER}, table of H100 SXM5"),
    clock=_HOPPER_CLOCK,
    products=_HOPPER_PRODUCTS,
    device_memory=Figure(3.35e12, BYTES, "NVIDIA H100 data sheet, H100 SXM"),
    cache_size=Figure(50 * 2**20, "B", f"{HOPPER}, table of H100 SXM5"),
    cache=_hopper_cache(80),
    on_chip_size=Figure(228 * 2**10, "B", CAPABILITIES),
)
_H200 = _nvidia(
    "NVIDIA H200",
    "sm_90",
    multiprocessors=Figure(132, "SMs", "what CUDA reports of an NVIDIA H200, benchmarks/results/nvidia-h200"),
    clock=_HOPPER_CLOCK,
    products=_HOPPER_PRODUCTS,
    device_memory=Figure(4.8e12, BYTES, "NVIDIA H200 data sheet, H200 SXM"),
    cache_size=Figure(60 * 2**20, "B", "what CUDA reports of an NVIDIA H200, benchmarks/results/nvidia-h200"),
    cache=_hopper_cache(96),
    on_chip_size=Figure(228 * 2**10, "B", CAPABILITIES),
)

_B200_CLOCK = Figure(1.85e9, "Hz", ZADOURI)
_B200 = _nvidia(
    "NVIDIA B200",
    "sm_100",
    multiprocessors=Figure(148, "SMs", ZADOURI),
    clock=_B200_CLOCK,
    products={
        **_products(f"{ZADOURI}: 2.25 PFLOPS", float16=2250, bfloat16=2250),
        **_products("derived: half of the rate of bfloat16, as on Hopper", tf32=1125),
        **_products("derived: 128 multiply-adds a clock on each SM (CUDA C++ Programming Guide)", float32=70.1),
        **_products("NVIDIA HGX B200 data sheet: 296 TFLOPS of eight", float64=37),
    },
    device_memory=Figure(8e12, BYTES, "NVIDIA DGX B200 data sheet: 64 TB/s of eight"),
    cache_size=Figure(126 * 2**20, "B", "Chips and Cheese 2025, Nvidia's B200: Keeping the CUDA Juggernaut Rolling"),
    cache=None,
    on_chip_size=Figure(228 * 2**10, "B", CAPABILITIES),
)

_RTX_4090 = _nvidia(
    "NVIDIA GeForce RTX 4090",
    "sm_89",
    multiprocessors=Figure(128, "SMs", ADA),
    clock=Figure(2.52e9, "Hz", f"{ADA}, GPU boost clock"),
    products=_products(ADA, float16=165.2, bfloat16=165.2, tf32=82.6, float32=82.6, float64=1.29),
    device_memory=Figure(1.008e12, BYTES, ADA),
    cache_size=Figure(72 * 2**20, "B", ADA),
    cache=None,
    on_chip_size=Figure(100 * 2**10, "B", CAPABILITIES),
)

_MI300X_CYCLES = 304 * 2.1e9
_MI300X = Hardware(
    name="AMD Instinct MI300X",
    device_type="cuda",
    architecture="gfx942",
    processors=Figure(304, "compute units", "AMD Instinct MI300X data sheet"),
    clock=Figure(2.1e9, "Hz", "AMD Instinct MI300X data sheet, peak engine clock"),
    products=_products(
        "AMD Instinct MI300X data sheet, matrix rates",
        float16=1307.4,
        bfloat16=1307.4,
        tf32=653.7,
        float32=163.4,
        float64=163.4,
    ),
    exponentials=Figure(
        16 * _MI300X_CYCLES,
        RATE,
        "derived: a quarter of the 64 lanes of a compute unit, as transcendental operations have on GCN and after",
    ),
    device_memory=Figure(5.3e12, BYTES, "AMD Instinct MI300X data sheet"),
    cache_size=Figure(288 * 2**20, "B", f"{CDNA3}: 256 MB of Infinity Cache and eight L2 caches of 4 MB"),
    cache=Figure(34.4e12, BYTES, f"{CDNA3}: 2 KB a clock from each of eight L2 caches"),
    on_chip=Figure(
        128 * _MI300X_CYCLES, BYTES, "derived: 32 banks of 4 bytes a clock in each LDS, times units and clock"
    ),
    on_chip_size=Figure(64 * 2**10, "B", f"{CDNA3}: LDS of a compute unit"),
    launch=None,
)

_ZEN4 = "Software Optimization Guide for the AMD Zen4 Microarchitecture (57647)"
_EPYC_CYCLES = 96 * 3.7e9


def _epyc(operations: int, how: str) -> Figure:
    return Figure(operations * _EPYC_CYCLES, FLOPS, f"derived: {operations} operations a clock on each core: {how}")


_FMA = f"two multiply-adds of 256 bits ({_ZEN4}, floating-point unit)"
_EPYC = Hardware(
    name="AMD EPYC 9654",
    device_type="cpu",
    architecture=None,
    processors=Figure(96, "cores", "AMD EPYC 9004 Series data sheet"),
    clock=Figure(
        3.7e9, "Hz", "AMD EPYC 9004 Series data sheet, maximum boost clock, which all cores together do not hold"
    ),
    products={
        "float32": _epyc(32, _FMA),
        "float64": _epyc(16, _FMA),
        "float16": _epyc(32, f"computed in float32, {_FMA}"),
        "bfloat16": _epyc(64, "AVX512_BF16 makes two products in the place of one in float32"),
    },
    exponentials=Figure(
        2 * _EPYC_CYCLES,
        RATE,
        "derived: 2 a clock on each core: at least 8 vector operations (range reduction 2, a polynomial of degree 5, "
        "one scaling), 16 numbers each, one operation of 512 bits a clock",
    ),
    device_memory=Figure(
        460.8e9, BYTES, "AMD EPYC 9004 Series data sheet: 12 channels of DDR5-4800, of the whole socket"
    ),
    cache_size=Figure(480 * 2**20, "B", "AMD EPYC 9004 Series data sheet: 384 MB of L3 and 1 MB of L2 for each core"),
    cache=None,
    on_chip=Figure(
        64 * _EPYC_CYCLES, BYTES, f"derived: two loads of 256 bits a clock on each core ({_ZEN4}, load-store unit)"
    ),
    on_chip_size=Figure(32 * 2**10, "B", f"{_ZEN4}, L1 data cache"),
    launch=None,
)

PRESETS = {
    "a100": _A100,
    "h100": _H100,
    "h200": _H200,
    "b200": _B200,
    "mi300x": _MI300X,
    "rtx4090": _RTX_4090,
    "epyc9654": _EPYC,
}
"""By the name that the command line takes."""

_DEVICES = {
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H200,
    "NVIDIA B200": _B200,
    "AMD Instinct MI300X": _MI300X,
    "NVIDIA GeForce RTX 4090": _RTX_4090,
}
"""By the exact name that torch gives a device: variants of a name (PCIe, NVL, 40GB) have other rates."""


def preset_of(device: torch.device) -> Hardware | None:
    """The preset of a device, by its exact name; None if there is none.

    A CPU is taken for a part of the one CPU that has a preset, with as many cores as torch has threads.
    """
    if device.type == "cpu":
        return _EPYC.scaled(torch.get_num_threads())
    return _DEVICES.get(device_name(device))


def hardware_of(device: torch.device) -> Hardware | None:
    """What is known of a device: its measured figures, or else its preset; None if there is neither.

    Figures of a CPU that were measured with another number of threads do not count.
    """
    measured = read_measured(measured_path(device))
    if measured is None or (device.type == "cpu" and measured.processors.value != torch.get_num_threads()):
        return preset_of(device)
    return measured
