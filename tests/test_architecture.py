"""The package's shape: who imports whom, what is public, and what `import onchip` costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import onchip

ROOT = Path(onchip.__file__).parent

# Lowest first. A module imports only from layers below its own, or from its own subpackage.
LAYERS = [
    {"errors", "_version", "tile", "strides", "products", "functions"},
    {"lowering", "philox", "softmax", "checks", "states"},
    {"masks", "problem"},
    {"scores", "normal_form", "nested"},
    {"segments"},
    {"choices"},
    {"model"},
    {"gpu"},
    {"schedules"},
    {"dispatch"},
    {"ops"},
    {"sharding"},
    {"attention", "rotary"},
    {"integrations", "compat"},
    {"onchip"},  # the public names, in __init__.py
    {"bench"},
    {"audit"},
    {"cli"},
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}

PUBLIC = {
    "attention", "attention_with_lse", "attention_varlen", "attention_varlen_with_lse", "Output", "plan", "plan_varlen",
    "Plan", "masks", "scores", "rotary", "Unsupported", "checked", "replace_sdpa", "__version__",
}  # fmt: skip

ARGUMENTS = [
    "causal", "window", "mask", "score", "lengths", "scale", "dropout_p", "dropout_seed", "deterministic", "schedule",
]  # fmt: skip


# What the first call of a GPU imports.
LATE = (("schedules", "triton"), ("schedules", "hopper"), ("rotary", "kernel"))


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, parts[:-1] if parts[-1] == "__init__" else parts


def layer_name(parts):
    return parts[0] if parts else "onchip"


def only_for_types(node):
    test = node.test
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")) == "TYPE_CHECKING"


def imports(path, nested=True):
    """Absolute dotted names that a file imports when it runs; `nested` includes those inside functions."""
    names, pending = [], list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.If) and only_for_types(node):
            pending += node.orelse
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return names


def own_imports(path):
    for name in imports(path):
        parts = tuple(name.split("."))
        if parts[0] != "onchip":
            continue
        known = len(parts) > 1 and parts[1] in LAYER_OF | dict.fromkeys(child.stem for child in ROOT.iterdir())
        yield parts[1:] if known else ()


@pytest.mark.parametrize(("path", "parts"), [pytest.param(*m, id=".".join(m[1]) or "onchip") for m in modules()])
def test_imports_point_down(path, parts):
    name = layer_name(parts)
    assert name in LAYER_OF, f"{name} has no layer: add it to LAYERS"
    for imported in own_imports(path):
        other = layer_name(imported)
        assert other in LAYER_OF, f"{other} has no layer: add it to LAYERS"
        assert other == name or LAYER_OF[other] < LAYER_OF[name], (
            f"{'.'.join(parts)} imports {other}, which is not below it"
        )


STANDS_ON = {"hopper": {"triton"}}
"""Schedules that leave something to the kernels of another one: gradients of sinks and slopes."""


def test_schedules_do_not_import_each_other():
    for path, parts in modules():
        if parts[:1] != ("schedules",):
            continue
        for imported in own_imports(path):
            if imported[:1] == ("schedules",) and len(parts) > 1:
                allowed = {parts[1], *STANDS_ON.get(parts[1], ())}
                assert imported[1] in allowed, f"{'.'.join(parts)} imports {'.'.join(imported)}"


@pytest.mark.parametrize("heavy", ["triton", "torch._dynamo", "torch._inductor", "numpy", "transformers", "matplotlib"])
def test_no_module_outside_tools_imports_heavy_packages_at_its_top(heavy):
    for path, parts in modules():
        if parts[:1] in (("bench",), ("audit",), ("cli",), ("gpu",)) or parts[:2] in LATE:
            continue
        named = [name for name in imports(path, nested=False) if name == heavy or name.startswith(heavy + ".")]
        assert not named, f"{'.'.join(parts)} imports {named}"


def test_exported_names():
    """The public names are those of the contract, each with a docstring; everything else is a module."""
    listed = {alias.asname or alias.name for node in ast.parse((ROOT / "__init__.py").read_text()).body
              if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    assert listed == PUBLIC
    others = {name for name, value in vars(onchip).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert others <= PUBLIC
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(onchip, name)), f"{name} has no docstring"


@pytest.mark.parametrize(
    "name", ["attention", "attention_with_lse", "attention_varlen", "attention_varlen_with_lse", "plan", "plan_varlen"]
)
def test_signatures(name):
    """The same keywords everywhere, and nothing is swallowed."""
    parameters = inspect.signature(getattr(onchip, name)).parameters
    keywords = [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert keywords == ARGUMENTS
    leading = ["query", "key", "value"] + ["cu_seqlens_query", "cu_seqlens_key"] * ("varlen" in name)
    assert list(parameters)[: len(leading)] == leading
    assert not any(
        parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters.values()
    )


def child(script):
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_adds_little_time():
    # of the processor, not of the clock: other programs may share the cores
    script = "import torch, time; start = time.process_time(); import onchip; print(time.process_time() - start)"
    child(script)  # writes the byte code
    best = min(float(child(script)) for _ in range(5))
    assert best <= 0.15, f"import onchip took {best:.3f} s after import torch"


LOADED = """
loaded = set(sys.modules) - before
print(*sorted(n for n in loaded if n.split(".")[0] == "triton" or n.startswith("torch._dynamo")))
"""


def test_import_loads_no_compiler():
    assert child("import sys, torch; before = set(sys.modules); import onchip" + LOADED).split() == []


def test_a_first_call_loads_no_compiler():
    script = """
import sys, torch, onchip
before = set(sys.modules)
x = torch.randn(1, 1, 8, 8, requires_grad=True)
onchip.attention(x, x, x, causal=True).sum().backward()
"""
    assert child(script + LOADED).split() == []
