"Low precision in networks of transformers: what its layers of their own are."
import copy
import pickle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import shok_nb as R

transformers = pytest.importorskip('transformers')
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128,
    max_position_embeddings=64)
MOE = SMALL | dict(num_key_value_heads=2)
MODELS = {
    'GPT2': ('Conv1D', dict(n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.), 4),
    'Mixtral': ('MixtralExperts', MOE | dict(num_local_experts=4), 1),
    'Qwen3Moe': ('Qwen3MoeExperts', MOE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        head_dim=16), 1),
    'GptOss': ('GptOssExperts', MOE | dict(num_local_experts=4, head_dim=16), 1)}
IDS = torch.arange(32).view(2, 16)*5 % 128

def gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]

def same(a, b): return len(a) == len(b) and all(map(torch.equal, a, b))

@pytest.mark.parametrize('name', MODELS)
def test_layers_of_its_own(name):
    "All are rounded and near the floats; a copy, a file and checkpointing have the same bits; float again they are."
    kind,config,count = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f'{name}Config')(**config)
    of = 'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'
    model = getattr(transformers, name+of)(config).train()
    floats = gradients(model)
    rows = R.low_precision_(model, 'mxfp8', seed=1).rows
    assert [r.recipe for r in rows if r.kind == kind] == ['mxfp8']*count
    assert all(r.recipe or r.kind.endswith('Router') for r in rows)
    copies = copy.deepcopy(model),pickle.loads(pickle.dumps(model))
    state,low = copy.deepcopy(model.state_dict()),gradients(model)
    assert not same(floats, low) and abs(low[0]-floats[0]) < .02
    for m in copies: assert same(gradients(m), low)
    model.load_state_dict(state)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert same(gradients(model), low)
    model.gradient_checkpointing_disable()
    R.nn.remove_rounding_(model)
    assert same(gradients(model), floats)

class Products(TorchDispatchMode):
    "The names of Parameters that a product has as they are, and not as bfloat16 holds them."
    OPERANDS = dict(mm=(0, 1), bmm=(0, 1), addmm=(1, 2), baddbmm=(1, 2), convolution=(0, 1),
        convolution_backward=(0, 1, 2))
    def __init__(self, model):
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): n for n,p in model.named_parameters()}
        self.whole,self.count = set(),0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = [args[i] for i in self.OPERANDS.get(func._schema.name.removeprefix('aten::'), ())]
        self.count += bool(operands)
        for t in operands:
            name = self.names.get(t.untyped_storage().data_ptr())
            if name and not torch.equal(t, t.bfloat16().float()): self.whole.add(name)
        return func(*args, **(kwargs or {}))

WATCHED = {
    'BertForMaskedLM': SMALL, 'LlamaForCausalLM': SMALL, 'BartForCausalLM': dict(d_model=64, decoder_layers=1,
        decoder_attention_heads=4, decoder_ffn_dim=96, vocab_size=128, max_position_embeddings=64),
    'AriaTextForCausalLM': SMALL | dict(moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, head_dim=16,
        pad_token_id=0),
    'Qwen3NextForCausalLM': MOE | dict(num_hidden_layers=4, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)}

@pytest.mark.parametrize('name', WATCHED)
def test_what_multiplies_unrounded_is_named(name):
    """In forward and backward. Qwen3-Next calls its convolutions by a function of their weights: the report said that
    they were rounded, and they were not."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**WATCHED[name])).train()
    rows = {r.name: r for r in R.low_precision_(model, 'bfloat16').rows}
    with Products(model) as products: gradients(model)
    assert products.count > 10
    told = {n for n,r in rows.items() if not r.recipe or 'unrounded' in r.note}
    assert {n.rpartition('.')[0] for n in products.whole} == told
