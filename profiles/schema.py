"""What a profile may say: every key, its type, its default and what it means. Nothing else is accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from sparsekv.kernels.layout import KVLayout, RowFormat
from sparsekv.kernels.policy import SelectionPolicy

from . import units


def _parse_switch(value: object) -> object:
    """`on`, `off`, `yes` and `no` are words to YAML 1.2; for a switch they mean what they say."""
    return {"on": True, "yes": True, "off": False, "no": False}.get(value, value) if isinstance(value, str) else value


def _quantity(parse: Any, show: Any, pattern: str) -> tuple[Any, ...]:
    return (
        BeforeValidator(parse),
        PlainSerializer(show, when_used="json"),
        WithJsonSchema({"type": "string", "pattern": pattern}),
    )


class FilePath:
    """Marks a path: `~` and variables are expanded, and a relative one starts at the file that states it."""


Size = Annotated[int, *_quantity(units.parse_size, units.format_size, units.SIZE_PATTERN)]
Watts = Annotated[float, *_quantity(units.parse_watts, units.format_watts, units.POWER_PATTERN)]
Rate = Annotated[float, *_quantity(units.parse_rate, units.format_rate, units.RATE_PATTERN)]
Path = Annotated[str, Field(min_length=1), FilePath()]
Switch = Annotated[
    bool, BeforeValidator(_parse_switch), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["on", "off", "yes", "no"]}]})
]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Band = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)]
"""Lowest and highest value to expect."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Pcie(Section):
    """The link of each card, as it trains under load."""

    generation: Annotated[int, Field(ge=1, le=6, description="PCIe generation")] = 4
    width: Annotated[Literal[1, 2, 4, 8, 16], Field(description="lanes")] = 16


class Hardware(Section):
    """The machine the profile is for; `sparsekv doctor` and `serve` compare it with the machine they run on."""

    device: Annotated[Literal["cuda", "cpu"], Field(description="what computes")] = "cuda"
    gpu: Annotated[str | None, Field(description="product name as nvidia-smi prints it, without `NVIDIA`")] = None
    gpus: Annotated[Count, Field(description="cards the server uses")] = 1
    vram: Annotated[Size, Field(description="memory of one card as CUDA reports it, 1 to 3 percent less than on the box")] = 0
    vram_rate: Annotated[Rate | None, Field(description="memory bandwidth of one card, from its data sheet")] = None
    compute_capability: Annotated[str | None, Field(pattern=r"^\d+\.\d$", description="quoted, such as '8.6'")] = None
    pcie: Pcie = Pcie()
    link_rate: Annotated[
        Rate | None, Field(description="measured host-to-card rate of row gathers; unset: estimated from generation and width")
    ] = None
    p2p: Annotated[Literal["none", "nvlink", "patched"], Field(description="how the cards reach each other's memory")] = "none"
    power_cap: Annotated[Watts | None, Field(description="limit of each card, set by `serve --apply-power-cap` and by nothing else")] = None
    ram: Annotated[Size, Field(description="memory of the machine")] = 0
    numa_bind: Annotated[Switch, Field(description="bind each worker to the node of its card")] = False
    platform: Annotated[Literal["native", "wsl2", "vm"], Field(description="where Linux runs")] = "native"


class Shape(Section):
    """What memory arithmetic must know of the model. Read from `config.json` where the model's folder is there, and then checked."""

    attention_layers: Annotated[Positive, Field(description="layers with full attention, the draft head's not counted")]
    draft_layers: Annotated[Count, Field(description="attention layers of the multi-token-prediction head, used when it speculates")] = 0
    query_heads: Annotated[Positive, Field(description="query heads of a layer, over all cards")]
    kv_heads: Annotated[Positive, Field(description="KV heads of a layer, over all cards")]
    head_dim: Annotated[Positive, Field(description="dimensions of a head")]
    recurrent_layers: Annotated[Count, Field(description="layers with a recurrent state instead of KV rows")] = 0
    recurrent_state: Annotated[Size, Field(description="one sequence's recurrent state over all layers, in float32")] = 0


class Model(Section):
    """Which checkpoint is served."""

    path: Annotated[Path, Field(description="folder with config.json, tokenizer and *.safetensors")]
    name: Annotated[str, Field(min_length=1, description="name clients ask for")]
    max_model_len: Annotated[Positive, Field(description="longest request, prompt and answer together, in tokens")]
    weights: Annotated[Size, Field(description="size of the weights, for planning where the folder is absent")] = 0
    dtype: Annotated[Literal["auto", "bfloat16", "float16"], Field(description="arithmetic of the model; auto: its own")] = "auto"
    text_only: Annotated[Switch, Field(description="leave the vision tower of a multimodal model unloaded")] = False
    chat_template: Annotated[Path | None, Field(description="Jinja file in place of the model's own")] = None
    shape: Annotated[Shape | None, Field(description="for planning where the folder is absent")] = None


class Parallel(Section):
    """How the model is spread over cards."""

    tensor: Annotated[Positive, Field(description="tensor-parallel ranks")] = 1
    custom_all_reduce: Annotated[Switch, Field(description="vLLM's own all-reduce; wrong data on some patched drivers")] = False


class KV(Section):
    """The KV cache: every token of every conversation, as rows in one pool."""

    placement: Annotated[Literal["host", "gpu"], Field(description="where rows lie; the sketch is always on the card")] = "host"
    dtype: Annotated[RowFormat, Field(description="format of a row")] = "int8"
    pool: Annotated[Size, Field(gt=0, description="memory of the rows over all cards and layers")]
    headroom: Annotated[Size, Field(description="host memory that stays free beside the pool, for processes and page cache")] = 4 * 2**30
    hot: Annotated[Size, Field(description="memory per card for rows kept there because they are read again and again")] = 0


class Sketch(Section):
    """The small code per token by which rows are found."""

    basis: Annotated[Path, Field(description="basis file, or the name of one that ships with sparsekv")]
    rank: Annotated[Positive, Field(description="dimensions of a code")] = 128
    bits: Annotated[Literal[4, 8], Field(description="bits per dimension")] = 4


_POLICY = SelectionPolicy()


class Selection(Section):
    """How many rows a decode step reads, per request and KV head."""

    min_tokens: Annotated[Positive, Field(description="rows read at least")] = _POLICY.min_tokens
    max_tokens: Annotated[Positive, Field(description="rows read at most, sinks, window and runs not counted")] = _POLICY.max_tokens
    mass: Annotated[Fraction, Field(description="share of the estimated attention that the rows must hold")] = _POLICY.mass
    sink_tokens: Annotated[Count, Field(description="first tokens, always read")] = _POLICY.sink_tokens
    window_tokens: Annotated[Count, Field(description="latest tokens, always read")] = _POLICY.window_tokens
    run_hits: Annotated[Count, Field(description="strongest tokens whose neighbours are read too")] = _POLICY.run_hits
    run_radius: Annotated[Count, Field(description="neighbours on either side")] = _POLICY.run_radius
    dense_below: Annotated[Count, Field(description="a context of at most so many tokens is read whole")] = _POLICY.dense_below

    def policy(self) -> SelectionPolicy:
        return SelectionPolicy(**self.model_dump())


class Scheduler(Section):
    """How many requests run and how their prompts are cut."""

    max_num_seqs: Annotated[Positive, Field(description="requests that run at once")] = 8
    max_num_batched_tokens: Annotated[Positive, Field(description="tokens of one step, and the largest piece of a prompt")] = 2048
    itl_target_ms: Annotated[float, Field(gt=0, description="time between two steps of an answer while prompts are read beside it")] = 50
    idle_step_ms: Annotated[float, Field(gt=0, description="longest step while no request answers; newcomers wait at most two")] = 1000
    max_queued_requests: Annotated[Count, Field(description="requests that may run or wait before new ones get 503; 0: no limit")] = 0
    max_queued_tokens: Annotated[
        Count, Field(description="prompt tokens, known beginnings included, that may be unread before new requests get 503; 0: no limit")
    ] = 0
    retry_after_s: Annotated[Positive, Field(description="when a client that got 503 may try again")] = 15
    prefix_caching: Annotated[Switch, Field(description="reuse the rows of a prompt's known beginning")] = True


class Recurrent(Section):
    """State of recurrent layers (Gated DeltaNet, Mamba); ignored by models without them."""

    cache_mode: Annotated[Literal["align", "none"], Field(description="keep states at block boundaries, or not at all")] = "align"
    state_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], Field(description="precision of the states; auto: the model's own")
    ] = "auto"
    checkpoints: Annotated[Size, Field(description="host memory for states that may be resumed from, over all cards; 0: none")] = 0
    retention_interval: Annotated[Count, Field(description="keep a state every so many tokens of a prompt; 0: only at its end")] = 0
    retention_turns: Annotated[Positive, Field(description="latest prompts of a conversation whose ends, and answers' ends, are kept")] = 2


class Speculation(Section):
    """Draft tokens that one step verifies."""

    method: Annotated[Literal["none", "mtp", "ngram"], Field(description="who drafts: the model's own head, or its prompt")] = "none"
    tokens: Annotated[Count, Field(le=16, description="drafts per step")] = 0
    sample: Annotated[Literal["probabilistic", "greedy"], Field(description="how a draft model draws")] = "probabilistic"
    ngram_min: Annotated[Positive, Field(description="`ngram`: shortest match in tokens")] = 2
    ngram_max: Annotated[Positive, Field(description="`ngram`: longest match in tokens")] = 5


class Memory(Section):
    """Memory of a card beside rows, sketch and hot set."""

    gpu_memory_utilization: Annotated[Fraction, Field(description="share of each card that vLLM may fill")] = 0.92
    activations: Annotated[Size, Field(description="planning figure: activations, CUDA graphs and libraries, per card")] = 2 * 2**30
    device_pool: Annotated[
        Size | None, Field(description="vLLM's own cache per card (recurrent states); unset: all that is left under the limit")
    ] = None
    cudagraphs: Annotated[Switch, Field(description="capture CUDA graphs; off only to find an error")] = True
    max_cudagraph_size: Annotated[Count, Field(description="largest batch captured; 0: vLLM decides")] = 0
    expandable_segments: Annotated[Switch, Field(description="PyTorch allocator setting")] = False


class Server(Section):
    """The HTTP side."""

    host: Annotated[str, Field(min_length=1, description="listen address; anything but this machine needs a key")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="listen port")] = 8000
    api_key_file: Annotated[Path | None, Field(description="file with the clients' key, readable by its owner alone")] = None
    reasoning_parser: Annotated[str | None, Field(description="vLLM parser of the model's thinking")] = None
    tool_parser: Annotated[str | None, Field(description="vLLM parser of the model's tool calls")] = None
    tool_strict_level: Annotated[Literal["auto", "parameter"] | None, Field(description="unset: vLLM's default")] = None
    sse_keep_alive_seconds: Annotated[Count, Field(description="a comment on silent streams, so that proxies keep them; 0: none")] = 30


class Validation(Section):
    """What `sparsekv validate recall` demands."""

    recall_mean: Annotated[Fraction, Field(description="share of the attention the selected rows hold, mean")] = 0.97
    recall_p1: Annotated[Fraction, Field(description="the same, first percentile")] = 0.85


class Expected(Section):
    """What this machine should reach, and how the figures were found."""

    source: Annotated[Literal["measured", "computed", "reported"], Field(description="how the figures were found")]
    decode_tokens_per_second: Annotated[Band | None, Field(description="all requests together")] = None
    prefill_tokens_per_second: Annotated[Band | None, Field(description="prompt tokens of all requests together")] = None
    note: Annotated[str | None, Field(description="what else to know about the figures")] = None


class Profile(Section):
    """A machine, a model and how the one serves the other."""

    description: Annotated[str, Field(min_length=1, max_length=120, description="what it is for, one line")]
    hardware: Hardware
    model: Model
    parallel: Parallel = Parallel()
    kv: KV
    sketch: Sketch
    selection: Selection = Selection()
    scheduler: Scheduler = Scheduler()
    recurrent: Recurrent = Recurrent()
    speculation: Speculation = Speculation()
    memory: Memory = Memory()
    server: Server = Server()
    validation: Validation = Validation()
    expected: Expected | None = None
    vllm: Annotated[
        dict[str, str | int | float | bool], Field(description="further vLLM options by their long name; none that a key above sets")
    ] = {}
    env: Annotated[dict[str, str], Field(description="environment variables of the server; no secrets")] = {}

    def attention_layers(self, shape: Shape) -> int:
        """Layers with rows: the model's own, and the draft head's where it speculates."""
        return shape.attention_layers + (shape.draft_layers if self.speculation.method == "mtp" else 0)

    def layout(self, shape: Shape) -> KVLayout:
        """One attention layer over all ranks."""
        return KVLayout(
            num_q_heads=shape.query_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            row_format=self.kv.dtype,
            sketch_rank=self.sketch.rank,
            sketch_bits=self.sketch.bits,
        )
