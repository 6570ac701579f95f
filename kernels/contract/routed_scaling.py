"""Who multiplies by `routed_scaling_factor` in a serving engine: once, never, twice?

The model's MoE block is constructed and its forward followed by `abstract.Interpreter` under one scenario (model,
quantisation, runner, platform), from the config's factor through the top-k's construction, `should_fuse_…_in_topk`,
the runner's config and kernels to the model's own multiply. The answer comes from the source read, never from a table
of versions. Background: internals.md §2 (sglang PRs 31762, 40584; issue reports listed there).

Assumed, and said in the result: one GPU (TP, EP and DP of 1), no LoRA, no expert remapping, no fused shared experts,
eager forward, environment variables at their defaults unless given.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from longrecall.kernels.contract.abstract import Interpreter
from longrecall.kernels.contract.source_tree import SourceError, SourceTree
from longrecall.kernels.contract.values import (
    PLAIN,
    Budget,
    Carried,
    ClassRef,
    Exponents,
    External,
    Frame,
    FunctionRef,
    Instance,
    Known,
    Mapping,
    Native,
    PathEnd,
    Record,
    Refusal,
    Scale,
    Sequence,
    Site,
    Tensor,
    Unknown,
    Value,
    Ways,
    exponents,
)

PLATFORMS = ("cuda", "hip", "cpu", "npu", "xpu")
ASSUMPTIONS = (
    "TP = EP = DP = 1, no LoRA, no expert remapping, no all-to-all backend",
    "shared experts are not fused into the routed experts' kernel",
    "eager forward (no graph capture), environment variables at their defaults unless given",
)

# Method class of a quantisation, by runner where the engine has one class per runner ("" = any other). These are names
# to look up in the source, not facts: a class that is not there is an error that says so.
QUANT_METHODS: dict[str, dict[str, str | None]] = {
    "bf16": {"": None},
    "fp8": {"": "Fp8MoEMethod"},
    "nvfp4": {"": "ModelOptNvFp4FusedMoEMethod"},
    "mxfp4": {
        "marlin": "Mxfp4MarlinMoEMethod",
        "flashinfer_cutlass": "Mxfp4FlashinferCutlassMoEMethod",
        "": "Mxfp4FlashinferTrtllmMoEMethod",
    },
    "w4afp8": {"": "W4AFp8MoEMethod"},
    "modelopt_fp8": {"": "ModelOptFp8MoEMethod"},
}

# Compiled kernels outside the tree whose contract their name states. FlashInfer's `…_routed_moe` take materialised
# top-k weights: the factor they are handed belongs to the in-kernel router, which such a call does not run.
EXTERNAL_KERNELS: dict[str, Exponents] = {r"^trtllm_\w+_routed_moe": frozenset({0})}

# Block-scale dtype of the formats (internals.md §2.6): kernels branch on it.
WEIGHT_SCALE_DTYPES = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.float8_e8m0fnu", "fp8": "torch.float32"}

# What the model's config says, in HuggingFace's key names (internals.md §2.1); anything else is unknown to the reader.
CONFIGS: dict[str, dict[str, object]] = {
    "deepseek_v4": dict(
        model_type="deepseek_v4", n_routed_experts=256, num_experts_per_tok=6, n_group=None, topk_group=None,
        scoring_func="sqrtsoftplus", topk_method="noaux_tc", num_hash_layers=3, n_shared_experts=1, norm_topk_prob=True,
        hidden_act="silu", hidden_size=4096, moe_intermediate_size=2048, swiglu_limit=10.0, vocab_size=129280,
        first_k_dense_replace=0, num_hidden_layers=43,
    ),
    "deepseek_v2": dict(
        model_type="deepseek_v3", n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
        scoring_func="sigmoid", topk_method="noaux_tc", num_hash_layers=0, n_shared_experts=1, norm_topk_prob=True,
        hidden_act="silu", hidden_size=7168, moe_intermediate_size=2048, vocab_size=129280, first_k_dense_replace=3,
        num_hidden_layers=61, num_attention_heads=128,
    ),
    "glm4_moe": dict(
        model_type="glm4_moe", n_routed_experts=128, num_experts_per_tok=8, n_group=1, topk_group=1,
        scoring_func="sigmoid", topk_method="noaux_tc", num_hash_layers=0, n_shared_experts=1, norm_topk_prob=True,
        hidden_act="silu", hidden_size=5120, moe_intermediate_size=1536, vocab_size=151552, first_k_dense_replace=3,
        num_hidden_layers=92,
    ),
}  # fmt: skip
CONFIG_OF = {"deepseek_v3": "deepseek_v2", "deepseek_v32": "deepseek_v2", "glm_moe_dsa": "deepseek_v2"}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is asked about."""

    model: str = "deepseek_v4"
    quant: str = "bf16"
    runner: str = "triton"
    platform: str = "cuda"
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """One kind of layer: exponents its routed and shared parts end with; None where the reading lost them."""

    routed: tuple[int, ...] | None
    shared: tuple[int, ...] | None
    sites: tuple[Site, ...]
    refusal: Refusal | None
    """Set when this kind of layer raises under the scenario: such a build does not start."""
    unresolved: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The answer for one scenario."""

    origin: str
    version: str | None
    scenario: Scenario
    layers: dict[str, LayerTrace]
    """Keys: "other", and "hash" where the model has hash-routed layers."""

    def exponent(self, layer: str, part: str = "routed") -> int | None:
        """The exponent of a part when it is known and single, else None."""
        trace = self.layers.get(layer)
        found = getattr(trace, part) if trace else None
        return found[0] if found is not None and len(found) == 1 else None

    @property
    def verdict(self) -> str:
        """once / never / twice / mixed / cannot tell, over the kinds of layer that can run."""
        kinds = [k for k, t in self.layers.items() if t.refusal is None]
        counts = {self.exponent(k) for k in kinds}
        if not kinds or None in counts:
            return "cannot tell"
        if len(counts) > 1:
            return "mixed"
        count = counts.pop()
        return {0: "never", 1: "once", 2: "twice"}.get(count if count is not None else -1, f"{count} times")

    def as_json(self) -> dict[str, object]:
        """Plain data for --json."""
        sites: dict[tuple[str, int], dict[str, object]] = {}
        for kind, layer in self.layers.items():
            for site in layer.sites:
                entry = sites.setdefault((site.file, site.line), {**asdict(site), "layers": []})
                if site.applies:
                    entry["applies"] = True
                    entry["condition"] = site.condition
                    entry["layers"].append(kind)  # type: ignore[attr-defined]
        return {
            "origin": self.origin,
            "version": self.version,
            **{k: v for k, v in asdict(self.scenario).items()},
            "sites": [sites[key] for key in sorted(sites)],
            "routed": {kind: self.exponent(kind) for kind in ("hash", "other") if kind in self.layers},
            "shared": {kind: self.exponent(kind, "shared") for kind in ("hash", "other") if kind in self.layers},
            "refused": {k: asdict(t.refusal) for k, t in self.layers.items() if t.refusal is not None},
            "unresolved": sorted({text for t in self.layers.values() for text in t.unresolved}),
            "assumed": list(ASSUMPTIONS),
            "verdict": self.verdict,
        }


def backends(tree: SourceTree) -> dict[str, str]:
    """Runner backends the source declares: value → enum member name."""
    path = _moe_utils(tree)
    for node in tree.module_ast(path).body:
        if isinstance(node, ast.ClassDef) and node.name == "MoeRunnerBackend":
            return {
                statement.value.value: target.id
                for statement in node.body
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
                for target in statement.targets
                if isinstance(target, ast.Name) and isinstance(statement.value.value, str)
            }
    raise SourceError(f"{tree.origin}: no class MoeRunnerBackend in {path}")


def _moe_utils(tree: SourceTree) -> str:
    path = f"{tree.package}/srt/layers/moe/utils.py"
    if not tree.exists(path):
        raise SourceError(f"{tree.origin}: no {path}: looked for class MoeRunnerBackend there")
    return path


def check_scenario(tree: SourceTree, scenario: Scenario) -> None:
    """Raise SourceError naming what is unknown and what the source knows instead."""
    if scenario.platform not in PLATFORMS:
        raise SourceError(f"unknown platform {scenario.platform!r}; one of {', '.join(PLATFORMS)}")
    if scenario.quant not in QUANT_METHODS:
        raise SourceError(f"unknown quant {scenario.quant!r}; one of {', '.join(QUANT_METHODS)}")
    known = backends(tree)
    if scenario.runner not in known:
        names = ", ".join(sorted(known))
        raise SourceError(f"unknown runner {scenario.runner!r}; {tree.origin} declares {names}")
    path = f"{tree.package}/srt/models/{scenario.model}.py"
    if not tree.exists(path):
        folder = f"{tree.package}/srt/models/"
        stems = (p.removeprefix(folder)[:-3] for p in tree.paths(f"{folder}{scenario.model[:5]}"))
        near = [stem for stem in stems if "/" not in stem]
        raise SourceError(
            f"{tree.origin}: no model file {path}" + (f"; there are {', '.join(near[:8])}" if near else "")
        )
    if CONFIG_OF.get(scenario.model, scenario.model) not in CONFIGS:
        raise SourceError(
            f"no config is known for model {scenario.model!r}; one of {', '.join([*CONFIGS, *CONFIG_OF])}"
        )


def trace(tree: SourceTree, scenario: Scenario) -> Trace:
    """Follow the factor through one scenario. Raises SourceError when the source is not what was looked for."""
    if tree.package == "longrecall":
        return _trace_reference(tree)
    check_scenario(tree, scenario)
    config = CONFIGS[CONFIG_OF.get(scenario.model, scenario.model)]
    kinds = {"other": int(str(config["num_hidden_layers"])) // 2}
    if config["num_hash_layers"]:
        kinds = {"hash": 0, **kinds}
    layers = {kind: _Reader(tree, scenario, config).read(layer_id) for kind, layer_id in kinds.items()}
    return Trace(origin=tree.origin, version=tree.version(), scenario=scenario, layers=layers)


class _Reading(Interpreter):
    """The interpreter with this engine's globals modelled."""

    def __init__(self, tree: SourceTree, scenario: Scenario):
        super().__init__(
            tree,
            {},
            environment=lambda name: Known(scenario.env[name]) if name in scenario.env else Unknown(name),
            flag_default=_flag,
        )
        self.scenario = scenario
        self.forward_names = {
            "cuda": ("forward", "forward_cuda", "forward_native", "__call__"),
            "hip": ("forward", "forward_hip", "forward_cuda", "forward_native"),
            "cpu": ("forward", "forward_cpu", "forward_native"),
            "npu": ("forward", "forward_npu", "forward_native"),
            "xpu": ("forward", "forward_xpu", "forward_native"),
        }[scenario.platform]

    def class_member(self, cls, name):
        # `forward` of torch-like dispatch bases only picks forward_<platform>; the platform's own is what runs
        found = super().class_member(cls, name)
        if name == "forward" and found is not None and found[0].name in ("MultiPlatformOp", "BaseFusedOp", "CustomOp"):
            return None
        return found

    def attribute(self, owner, name, node):
        if name.startswith("SGLANG_"):
            return self._environment_variable(owner, name)
        if name == "forward" and isinstance(owner, Instance) and self.class_member(owner.cls, "forward") is None:
            for platform_name in self.forward_names[1:]:
                if self.class_member(owner.cls, platform_name) is not None:
                    return super().attribute(owner, platform_name, node)
        return super().attribute(owner, name, node)

    def invoke(self, function, args, kwargs, node):
        # process-wide settings are not modelled: what is asked of them answers by `_flag`
        settings = ("/runtime_context.py", "/server_args.py", "/parallel_state.py", "/dp_attention.py")
        if function.path.endswith(settings) and function.name.startswith("get_"):
            return Unknown(f"{function.name}()")
        return super().invoke(function, args, kwargs, node)

    def _environment_variable(self, owner: Value, name: str) -> Value:
        default: Value = Unknown(name)
        if isinstance(owner, Instance):
            found = self.class_member(owner.cls, name)
            if found is not None and isinstance(found[1], (ast.Assign, ast.AnnAssign)):
                call = found[1].value
                if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                    default = Known(call.args[0].value)
        if name in self.scenario.env:
            default = _parsed(self.scenario.env[name])
        given = Known(name in self.scenario.env)
        return Record(
            name,
            {"get": Native("get", lambda i, a, k, n: default), "is_set": Native("is_set", lambda i, a, k, n: given)},
        )

    def construct(self, cls, args, kwargs, node):
        if cls.name.endswith("Gate"):
            return self.natives["MoEGate"].call(self, args, kwargs, node)
        return super().construct(cls, args, kwargs, node)

    def is_open(self, cls: ClassRef) -> bool:
        return cls.name == "FusedMoE"

    def kernel_model(self, short: str) -> Exponents | None:
        for pattern, powers in EXTERNAL_KERNELS.items():
            if re.search(pattern, short):
                return powers
        for suffix in (".cuh", ".cu"):
            for path in self.tree.paths(f"{self.tree.package}/", f"/{short}{suffix}"):
                return _powers_in_text(self.tree.text(path))
        return None


def _powers_in_text(text: str) -> Exponents | None:
    """Exponent a kernel's text applies: 1 where it multiplies by the factor, 0 where it only divides by it."""
    names = r"(?:\w+(?:\.|->))?(?:routed_)?scaling_factor\w*|ROUTED_SCALING_FACTOR"
    if re.search(rf"\*=?\s*(?:{names})\b|\b(?:{names})\s*\*", text):
        return frozenset({1})
    if re.search(rf"/\s*(?:{names})\b", text):
        return frozenset({0})
    return None


def _parsed(text: str) -> Known:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return Known(True)
    if lowered in ("0", "false", "no", "off", ""):
        return Known(False)
    return Known(text)


def _flag(name: str) -> Value:
    """Attributes of run-time objects that are not modelled: the plain single-GPU launch."""
    if name in ("disable_shared_experts_fusion",):
        return Known(True)
    if name in (
        "num_fused_shared_experts",
        "num_shared_topk_slots",
        "ep_num_redundant_experts",
        "n_share_experts_fusion",
    ):
        return Known(0)
    if name in ("lora_paths", "kt_config", "alt_stream", "waterfill_balancer", "e_score_correction_bias_vl"):
        return Known(None)
    if name.endswith(("_size", "_world_size")):
        return Known(1) if name.startswith(("tp", "ep", "dp", "moe_", "attn_", "pp")) else Unknown(name)
    if name.endswith("_rank"):
        return Known(0)
    if name.startswith(
        ("enable_", "_enable_", "use_waterfill", "in_speculative", "_dwdp", "_mega_moe", "flashinfer_trtllm_bypass")
    ):
        return Known(False)
    return Unknown(name)


def _const(value: object) -> Native:
    return Native("constant", lambda interp, args, kwargs, node: Known(value))


class _Reader:
    """Reads one kind of layer of one scenario."""

    def __init__(self, tree: SourceTree, scenario: Scenario, config: dict[str, object]):
        self.tree, self.scenario, self.config = tree, scenario, config
        self.reader = _Reading(tree, scenario)
        self._pools: dict[str, dict[tuple[str, str], FunctionRef]] | None = None
        self._dispatched: list[Value] = []
        self._install_natives()

    # ---- models of the engine's globals

    def _backend(self, class_name: str, value: str) -> Value:
        path = _moe_utils(self.tree)
        node = next(
            (n for n in self.tree.module_ast(path).body if isinstance(n, ast.ClassDef) and n.name == class_name), None
        )
        if node is None:
            raise SourceError(f"{self.tree.origin}: no class {class_name} in {path}")
        for statement in node.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                if statement.value.value == value and isinstance(statement.targets[0], ast.Name):
                    return self.reader.enum_member(ClassRef(path, node), statement.targets[0].id, Known(value))
        raise SourceError(f"{self.tree.origin}: {class_name} in {path} has no member of value {value!r}")

    def _install_natives(self) -> None:
        reader, scenario = self.reader, self.scenario
        runner = self._backend("MoeRunnerBackend", scenario.runner)
        natives = reader.natives
        natives["get_moe_runner_backend"] = Native("get_moe_runner_backend", lambda i, a, k, n: runner)
        a2a = self._backend("MoeA2ABackend", "none")
        natives["get_moe_a2a_backend"] = Native("get_moe_a2a_backend", lambda i, a, k, n: a2a)
        for platform in ("cuda", "hip", "cpu", "npu", "xpu", "musa", "mps", "hpu"):
            natives[f"is_{platform}"] = _const(platform == scenario.platform)
        natives["is_flashinfer_available"] = _const(scenario.platform == "cuda")
        natives["is_hip_runtime"] = _const(scenario.platform == "hip")
        natives["is_cuda_alike"] = _const(scenario.platform in ("cuda", "hip"))
        natives["get_bool_env_var"] = Native("get_bool_env_var", self._bool_env)
        for name in (
            "should_use_mega_moe",
            "is_in_piecewise_cuda_graph",
            "is_in_tc_piecewise_cuda_graph",
            "get_is_capture_mode",
            "is_in_breakable_cuda_graph",
            "is_in_pcg_torch_compile",
            "has_per_rank_fused_shared_slots",
            "is_sbo_enabled",
            "is_tbo_enabled",
            "is_expert_remapping_enabled",
            "cpu_has_amx_support",
            "use_intel_amx_backend",
            "is_deepep_class_backend",
            "is_dp_attention_enabled",
            "should_use_flashinfer_cutlass_moe_fp4_allgather",
            "use_symmetric_memory",
            "is_allocation_symmetric",
            "_can_dual_stream_graph",
            "should_skip_post_experts_all_reduce",
            "should_use_dp_reduce_scatterv",
            "is_non_idle_and_non_empty",
            "has_forward_context",
            "can_use_dual_stream",
            "is_sm120_supported",
            "is_sm100_supported",
            "is_batch_invariant_mode_enabled",
        ):
            natives[name] = _const(False)
        for name in (
            "get_tensor_model_parallel_world_size",
            "get_moe_expert_parallel_world_size",
            "get_moe_tensor_parallel_world_size",
            "get_attention_tp_size",
            "get_attention_dp_size",
        ):
            natives[name] = _const(1)
        for name in (
            "get_tensor_model_parallel_rank",
            "get_moe_expert_parallel_rank",
            "get_moe_tensor_parallel_rank",
            "get_num_fused_shared_experts",
            "get_attention_tp_rank",
        ):
            natives[name] = _const(0)
        for name in ("create_kt_config_from_server_args", "get_global_lplb_solver", "get_forward_context"):
            natives[name] = _const(None)
        natives["_forward_shared_experts"] = Native(
            "_forward_shared_experts", lambda i, a, k, n: i.tensor(Carried(shared=PLAIN), "shared")
        )
        natives["MoEGate"] = Native("MoEGate", self._gate)
        natives["create_moe_dispatcher"] = Native("create_moe_dispatcher", self._dispatcher)
        natives["get_fused_func"] = Native("get_fused_func", lambda i, a, k, n: self._pooled("register_fused_func", a))
        natives["get_pre_permute"] = Native(
            "get_pre_permute", lambda i, a, k, n: self._pooled("register_pre_permute", a)
        )
        natives["get_post_permute"] = Native(
            "get_post_permute", lambda i, a, k, n: self._pooled("register_post_permute", a)
        )
        for name in (
            "tensor_model_parallel_all_reduce",
            "post_experts_all_reduce",
            "moe_tensor_model_parallel_all_reduce",
        ):
            natives[name] = Native(name, lambda i, a, k, n: a[0] if a else Unknown("nothing to reduce"))
        for name in ("DeepseekV2MLP", "RoutedExpertsWeightsOfLayer", "ReplicatedLinear", "Parameter", "create_weights"):
            natives[name] = Native(name, lambda i, a, k, n: Record("module", {}, missing=_flag))
        natives["transform_select_experts_inputs"] = Native(
            "transform_select_experts_inputs",
            lambda i, a, k, n: Sequence([k.get("router_logits", Unknown()), k.get("correction_bias", Unknown())]),
        )
        natives["resolve_routing_inputs"] = Native(
            "resolve_routing_inputs", lambda i, a, k, n: Sequence([Known(None), Known(None)])
        )
        natives["init_new"] = _const(None)
        natives["load_jit"] = Native("load_jit", lambda i, a, k, n: External("jit"))
        for name in ("is_arch_support_pdl", "is_musa_runtime", "is_sail_runtime"):
            natives[name] = _const(False)
        natives["topk_ids_logical_to_physical"] = Native("topk_ids_logical_to_physical", lambda i, a, k, n: a[0])

    def _bool_env(self, interp: Interpreter, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        name = args[0].value if args and isinstance(args[0], Known) else None
        if isinstance(name, str) and name in self.scenario.env:
            return _parsed(self.scenario.env[name])
        default = args[1] if len(args) > 1 else kwargs.get("default", Known("false"))
        return _parsed(str(default.value)) if isinstance(default, Known) else Unknown(str(name))

    def _gate(self, interp: Interpreter, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        bias = (
            interp.tensor(label="bias") if not kwargs.get("is_hash_moe", Known(False)) == Known(True) else Known(None)
        )
        forward = Native("gate", lambda i, a, k, n: i.tensor(Carried(routed=PLAIN), "router_logits"))
        return Record(
            "MoEGate",
            {"__call__": forward, "e_score_correction_bias": bias, "e_score_correction_bias_vl": Known(None)},
            _flag,
        )

    def _dispatcher(self, interp: Interpreter, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        def dispatch(i: Interpreter, a: list[Value], k: dict[str, Value], n: ast.AST) -> Value:
            self._dispatched.append(k.get("topk_output", a[1] if len(a) > 1 else Unknown()))
            return Record(
                "StandardDispatchOutput",
                {
                    "hidden_states": k.get("hidden_states", a[0] if a else Unknown()),
                    "topk_output": k.get("topk_output", a[1] if len(a) > 1 else Unknown()),
                    "hidden_states_scale": Known(None),
                    "format": Record(
                        "format", {"is_standard": _const(True), "value": Known("standard")}, lambda m: _const(False)
                    ),
                },
                missing=lambda name: Known(None) if name.startswith("hidden_states") else Unknown(name),
            )

        def combine(i: Interpreter, a: list[Value], k: dict[str, Value], n: ast.AST) -> Value:
            combined = k.get("combine_input", a[0] if a else Unknown())
            hidden = i.attribute(combined, "hidden_states", n) if not isinstance(combined, Tensor) else combined
            if self.scenario.platform == "npu" and i.carried(hidden).routed is None and self._dispatched:
                # the NPU's dispatcher permutes the tokens and weighs them when it combines
                weights = i.attribute(self._dispatched[-1], "topk_weights", n)
                return i.tensor(i.carried(hidden).joined(Carried(i.carried(weights).routed)))
            return hidden

        return Record(
            "Dispatcher",
            {
                "dispatch": Native("dispatch", dispatch),
                "combine": Native("combine", combine),
                "expert_mask_gpu": Known(None),
                "local_expert_mapping": Known(None),
            },
            missing=_flag,
        )

    def _pooled(self, registrar: str, args: list[Value]) -> Value:
        """Function registered for (all-to-all or format, runner) by a decorator somewhere under layers/moe."""
        if self._pools is None:
            self._pools = {}
            for path in self.tree.paths(f"{self.tree.package}/srt/"):
                if "/moe" not in path and "/lora/" not in path and "/quantization/" not in path:
                    continue
                text = self.tree.text(path)
                if "@register_" not in text:
                    continue
                for node in self.tree.module_ast(path).body:
                    if not isinstance(node, ast.FunctionDef):
                        continue
                    for decorator in node.decorator_list:
                        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name):
                            key = tuple(a.value for a in decorator.args if isinstance(a, ast.Constant))
                            if len(key) == 2:
                                pool = self._pools.setdefault(decorator.func.id, {})
                                pool[str(key[0]), str(key[1])] = FunctionRef(path, node)
        pool = self._pools.get(registrar, {})
        first, second = (str(getattr(self._plain(a), "value", "")) for a in args[:2])
        if (first, second) in pool or registrar == "register_fused_func":
            return pool.get((first, second), Known(None))
        # a platform's own dispatch format (NPU) in place of "standard"
        runner = second if registrar == "register_pre_permute" else first
        other = [f for k, f in pool.items() if runner in k and not any("deepep" in part for part in k)]
        return other[0] if len(other) == 1 else Known(None)

    def _plain(self, value: Value) -> Value:
        return value.attributes["value"] if isinstance(value, Record) and "value" in value.attributes else value  # type: ignore[return-value]

    # ---- the reading

    def _quant_config(self) -> Value:
        methods = QUANT_METHODS[self.scenario.quant]
        name = methods.get(self.scenario.runner, methods[""])
        if name is None:
            return Known(None)
        found = None
        for path in self.tree.paths(f"{self.tree.package}/srt/layers/quantization/"):
            if f"class {name}" in self.tree.text(path):
                for node in self.tree.module_ast(path).body:
                    if isinstance(node, ast.ClassDef) and node.name == name:
                        found = ClassRef(path, node)
        if found is None:
            raise SourceError(
                f"{self.tree.origin}: no class {name} under {self.tree.package}/srt/layers/quantization/ "
                f"(the MoE method of quant {self.scenario.quant!r} on runner {self.scenario.runner!r})"
            )
        method_class = found

        def get_quant_method(i: Interpreter, a: list[Value], k: dict[str, Value], n: ast.AST) -> Value:
            instance = Instance(method_class)
            initialiser = i.class_member(method_class, "__init__")
            if initialiser is not None and isinstance(initialiser[1], ast.FunctionDef):
                names = [p.arg for p in initialiser[1].args.args[1:]]
                given = {name: config for name in names if "config" in name}
                given |= {name: Known("experts") for name in names if name == "prefix"}
                if "fp8_method" in names:
                    given["fp8_method"] = Record("Fp8MoEMethod", {}, missing=_flag)
                try:
                    i.call(
                        FunctionRef(initialiser[0].path, initialiser[1], bound=instance, owner=initialiser[0]),
                        [],
                        given,
                        n,
                    )
                except PathEnd:
                    i.refusals.clear()
            return instance

        fp4 = self.scenario.quant in ("mxfp4", "nvfp4")
        config = Record(
            "QuantConfig",
            {
                "get_quant_method": Native("get_quant_method", get_quant_method),
                "is_fp4_experts": Known(fp4),
                "is_checkpoint_fp8_serialized": Known(True),
                "is_checkpoint_nvfp4_serialized": Known(True),
                "weight_block_size": Sequence([Known(128), Known(128)])
                if self.scenario.quant == "fp8"
                else Known(None),
                "activation_scheme": Known("dynamic"),
                "use_mxfp8": Known(False),
                "use_per_token_activation": Known(False),
                "get_name": _const(
                    {"nvfp4": "modelopt_fp4", "mxfp4": "fp8"}.get(self.scenario.quant, self.scenario.quant)
                ),
            },
            missing=_flag,
        )
        return config

    def _moe_class(self) -> tuple[ClassRef, dict[str, ast.expr]]:
        """The MoE block the model file constructs, and the constant keywords it is given."""
        path = f"{self.tree.package}/srt/models/{self.scenario.model}.py"
        reader = self.reader
        candidates: list[tuple[ClassRef, dict[str, ast.expr]]] = []
        seen = {path}
        queue = [path]
        while queue and not candidates and len(seen) < 6:
            current = queue.pop(0)
            for node in ast.walk(self.tree.module_ast(current)):
                if not isinstance(node, ast.Call) or "MoE" not in ast.unparse(node.func).split(".")[-1]:
                    continue
                reader.frames.append(_frame(current))
                try:
                    value = reader.evaluate(node.func)
                finally:
                    reader.frames.pop()
                if isinstance(value, ClassRef) and _assigns(value.node, ("topk", "experts")):
                    keywords = {k.arg: k.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
                    candidates.append((value, keywords))
            if not candidates:
                for cls in ast.walk(self.tree.module_ast(current)):
                    if isinstance(cls, ast.ClassDef) and _assigns(cls, ("topk", "experts")):
                        candidates.append((ClassRef(current, cls), {}))
                for node in self.tree.module_ast(current).body:
                    if isinstance(node, ast.ImportFrom) and node.module and ".models." in node.module + ".":
                        target = self.tree.module_path(node.module)
                        if target and target not in seen:
                            seen.add(target)
                            queue.append(target)
        if not candidates:
            raise SourceError(
                f"{self.tree.origin}: {path} constructs no MoE block: no class sets self.topk and self.experts"
            )
        return candidates[0]

    def read(self, layer_id: int) -> LayerTrace:
        reader = self.reader
        cls, keywords = self._moe_class()
        attributes: dict[str, Value] = {k: Known(v) for k, v in self.config.items()}
        attributes["routed_scaling_factor"] = Scale(frozenset({1}))
        config = Record("config", attributes, missing=lambda name: Unknown(f"config.{name}"))
        given: dict[str, Value] = {k: Known(v.value) for k, v in keywords.items() if isinstance(v, ast.Constant)}
        given |= {
            "config": config,
            "layer_id": Known(layer_id),
            "quant_config": self._quant_config(),
            "prefix": Known("mlp"),
        }
        if self.scenario.model == "deepseek_v4":
            given.setdefault("is_deepseek_v4", Known(True))
        initialiser = reader.class_member(cls, "__init__")
        if initialiser is None or not isinstance(initialiser[1], ast.FunctionDef):
            raise SourceError(f"{self.tree.origin}: {cls.path}: {cls.name} has no __init__")
        accepted = {a.arg for a in (*initialiser[1].args.args, *initialiser[1].args.kwonlyargs)}
        given = {k: v for k, v in given.items() if k in accepted}

        def run() -> Value:
            block = reader.construct(cls, [], given, cls.node)
            if not isinstance(block, Instance):
                return Unknown("not reached")
            self._settle(block)
            self._undecided_fusion(block)
            # what the sites of construction touch is the top-k's flag, not a tensor
            return self._forward(block, reader.tensor(label="hidden"), cls.node)

        return _layer_trace(reader, cls, run)

    def _settle(self, block: Instance) -> None:
        """Attributes of the block that a plain launch leaves off, where the reading could not decide them."""
        attributes = self.reader.state.attributes
        for name, value in {"num_fused_shared_experts": 0, "_enable_a2a_moe": False, "alt_stream": None,
                            "_fuse_shared_experts_inside_sbo": False, "_shared_expert_tp1": False,
                            "moe_ep_size": 1, "tp_size": 1}.items():  # fmt: skip
            if not isinstance(attributes.get((block.ident, name)), Known):
                attributes[block.ident, name] = Known(value)

    def _undecided_fusion(self, block: Instance) -> None:
        experts = self.reader.state.attributes.get((block.ident, "experts"))
        if not isinstance(experts, Instance):
            self.reader.note_unresolved("self.experts of the MoE block was not resolved")
            return
        dtype = WEIGHT_SCALE_DTYPES.get(self.scenario.quant)
        if dtype is not None:
            for name in ("w13_weight_scale", "w2_weight_scale", "w13_weight_scale_inv", "w2_weight_scale_inv"):
                self.reader.state.attributes[experts.ident, name] = Tensor(label=dtype)
        fused = self.reader.state.attributes.get((experts.ident, "should_fuse_routed_scaling_factor_in_topk"))
        if self.reader.truth(fused) is None if fused is not None else False:
            self.reader.note_unresolved("should_fuse_routed_scaling_factor_in_topk was not decided")

    def _forward(self, block: Instance, hidden: Tensor, at: ast.AST) -> Value:
        reader = self.reader
        for name in ("forward_normal", "forward"):
            found = reader.class_member(block.cls, name)
            if found is None or not isinstance(found[1], ast.FunctionDef):
                continue
            parameters = [a.arg for a in (*found[1].args.args, *found[1].args.kwonlyargs)][1:]
            given: dict[str, Value] = {}
            for parameter in parameters[1:]:
                if parameter.startswith("input_ids"):
                    given[parameter] = Known(1)
                elif parameter in ("forward_batch", "gemm_output_zero_allocator"):
                    given[parameter] = Unknown(parameter)
            method = FunctionRef(found[0].path, found[1], bound=block, owner=found[0])
            return reader.call(method, [hidden], given, at)
        raise SourceError(
            f"{self.tree.origin}: {block.cls.path}: {block.cls.name} has neither forward_normal nor forward"
        )


def _layer_trace(reader: _Reading, cls: ClassRef, run: Callable[[], Value]) -> LayerTrace:
    """What a reading of one layer came to, also when it ended early."""
    result: Value = Unknown("not reached")
    refusal: Refusal | None = None
    budget: list[str] = []
    reader.frames.append(_frame(cls.path))
    try:
        result = run()
    except PathEnd:
        refusal = reader.refusals[-1] if reader.refusals else None
    except Budget as error:
        budget.append(str(error))
    except RecursionError:
        budget.append("the reading nests too deeply")
    finally:
        reader.frames.pop()
    carried = reader.carried(result)
    return LayerTrace(
        routed=_sorted(exponents(carried.routed)),
        shared=_sorted(exponents(carried.shared)),
        sites=_final_sites(reader, carried.routed, carried.shared),
        refusal=refusal,
        unresolved=tuple(dict.fromkeys([*reader.unresolved.values(), *budget, *_why(result, carried, refusal)])),
    )


def _why(result: Value, carried: Carried, refusal: Refusal | None) -> list[str]:
    """Why the routed part has not one exponent."""
    if refusal is not None:
        return []
    if carried.routed is None:
        why = getattr(result, "why", "") or type(result).__name__
        return [f"the routed output was lost on the way ({why})"]
    if len(exponents(carried.routed) or ()) > 1:
        return [f"undecided conditions leave exponents {sorted(exponents(carried.routed) or ())}"]
    return []


REFERENCE_BLOCK = ("longrecall/runners/reference/moe.py", "ReferenceMoE")


def _trace_reference(tree: SourceTree) -> Trace:
    """The reference build's own MoE block: the same reading with its few globals modelled."""
    path, name = REFERENCE_BLOCK
    node = next((n for n in tree.module_ast(path).body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:
        raise SourceError(f"{tree.origin}: no class {name} in {path}")
    scenario = Scenario(model="reference", quant="bf16", runner="torch")
    layers = {kind: _read_reference(tree, ClassRef(path, node), layer_id) for kind, layer_id in _REFERENCE_LAYERS}
    return Trace(origin=tree.origin, version=tree.version(), scenario=scenario, layers=layers)


_REFERENCE_LAYERS = (("hash", 0), ("other", 9))


def _read_reference(tree: SourceTree, cls: ClassRef, layer_id: int) -> LayerTrace:
    reader = _Reading(tree, Scenario(model="reference"))

    def linear(i: Interpreter, a: list[Value], k: dict[str, Value], n: ast.AST) -> Value:
        gate = isinstance(n, ast.Call) and len(n.args) > 1 and "gate_weight" in ast.unparse(n.args[1])
        return i.tensor(Carried(routed=PLAIN) if gate else i.carried(a[0]))

    def gated_mlp(i: Interpreter, a: list[Value], k: dict[str, Value], n: ast.AST) -> Value:
        shared = isinstance(n, ast.Call) and any("shared" in ast.unparse(argument) for argument in n.args)
        return i.tensor(Carried(shared=PLAIN) if shared else i.carried(a[0]))

    reader.natives |= {"linear": Native("linear", linear), "gated_mlp": Native("gated_mlp", gated_mlp)}
    factor = Scale(frozenset({1}))
    config = Record(
        "config",
        {
            "routed_scaling_factor": factor,
            "trained_routed_scaling_factor": factor,
            "num_hash_layers": Known(3),
            "scoring_func": Known("sqrtsoftplus"),
            "num_experts_per_tok": Known(2),
            "n_routed_experts": Known(8),
        },
        missing=lambda name: Unknown(f"config.{name}"),
    )
    given: dict[str, Value] = {"config": config, "layer_id": Known(layer_id), "weights": Mapping({})}

    def run() -> Value:
        block = reader.construct(cls, [], given, cls.node)
        return reader.call(block, [reader.tensor(label="hidden"), Unknown("token_ids")], {}, cls.node)

    return _layer_trace(reader, cls, run)


def _final_sites(reader: Interpreter, *parts: Ways | None) -> tuple[Site, ...]:
    """Every site met, marked by whether what is returned went through it."""
    through = {(file, line) for ways in parts if ways for way in ways for file, line, power in way if power}
    sites = []
    for key, site in sorted(reader.sites.items()):
        applies = key in through
        note = site.condition if applies or not site.applies else f"{site.condition}; not on the returned path"
        sites.append(Site(**{**asdict(site), "applies": applies, "condition": note}))
    return tuple(sites)


def _frame(path: str) -> Frame:
    return Frame(path, "<module>", {})


def _sorted(values: Exponents | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(sorted(values))


def _assigns(node: ast.ClassDef, names: tuple[str, ...]) -> bool:
    """Whether a class's __init__ sets all those attributes of self."""
    found = set()
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            for statement in ast.walk(function):
                for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                        found.add(target.attr)
    return set(names) <= found
