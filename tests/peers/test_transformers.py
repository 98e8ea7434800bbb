"Low precision in networks of transformers: what its layers of their own are."
import copy
import pickle
import pytest
import torch
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
