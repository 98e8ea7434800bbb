"""Networks that others wrote, from import to ONNX Runtime, in one table.

    make zoo                            one network of each family
    make zoo ARGS="--all"               every one
    make zoo ARGS="resnet18 gpt2"       these, again
    make zoo ARGS="--failed"            those that failed, again

Each network has random weights and a small input. It is quantized, deployed, written and opened in ONNX Runtime, once
with 8 bits for weights and activations and once with 4-bit weights in blocks of 32, and some networks with 4 bits for
both. What is done already is not done again: bench/zoo.json holds a row for each network and setting, and the row of a
network that fails holds the error."""
import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
import types
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

TABLE = Path(__file__).with_name('zoo.json')
SETTINGS = '8/8','4 in blocks of 32','4/4'
LIMIT = 900                                     # seconds for one network in one setting

# --- the networks
SIZES = dict(inception_v3=96, alexnet=80, googlenet=64, vit_b_16=32, vit_b_32=64, vit_h_14=28, vit_l_16=32,
    vit_l_32=64, maxvit_t=224)
FAMILIES = ('alexnet', 'convnext_tiny', 'densenet121', 'efficientnet_b0', 'efficientnet_v2_s', 'googlenet',
    'inception_v3', 'maxvit_t', 'mnasnet0_5', 'mobilenet_v2', 'mobilenet_v3_small', 'regnet_x_400mf', 'resnet18',
    'resnext50_32x4d', 'shufflenet_v2_x0_5', 'squeezenet1_0', 'swin_t', 'swin_v2_t', 'vgg11', 'vit_b_16',
    'wide_resnet50_2')

FOUR_BITS = ('alexnet', 'mnasnet0_5', 'mobilenet_v2', 'mobilenet_v3_small', 'resnet18', 'shufflenet_v2_x0_5',
    'squeezenet1_0')

def torchvision():
    "The package, beside a torch for CPUs: its operators are not needed here."
    sys.modules.setdefault('torchvision._meta_registrations', types.ModuleType('_meta_registrations'))
    import torchvision.models
    return torchvision

def from_torchvision(name):
    "A network of torchvision and two batches."
    import torch
    size = SIZES.get(name, 64)
    options = dict(weights=None)
    if name.startswith('vit'): options |= dict(image_size=size)
    if name == 'maxvit_t': options |= dict(input_size=(size, size))
    if name in ('googlenet', 'inception_v3'): options |= dict(init_weights=True)
    if name == 'inception_v3': options |= dict(aux_logits=False)     # the other output needs larger images
    model = torchvision().models.get_model(name, **options)
    if name.startswith('vit'): torch.nn.init.normal_(model.heads[-1].weight, std=.02)   # it is all zeros
    images = [torch.randn(4, 3, size, size) for _ in range(2)]
    model.train()
    with torch.no_grad():
        for x in images: model(x)               # the statistics of the normalizations
    return model.eval(),images

SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512)
GROUPS = SMALL | dict(num_key_value_heads=2, use_cache=False, max_position_embeddings=64)
TEXT = 'text'
def _gpt(**more): return dict(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=64, use_cache=False) | more
def _seq(**more):
    return dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=512, use_cache=False) | more

# kind of model in transformers: class of the configuration, class of the model, options, input
NETWORKS = dict(
    albert=('Albert', 'AlbertModel', SMALL | dict(embedding_size=32), TEXT),
    bert=('Bert', 'BertModel', SMALL, TEXT),
    camembert=('Camembert', 'CamembertModel', SMALL, TEXT),
    convbert=('ConvBert', 'ConvBertModel', SMALL | dict(embedding_size=64), TEXT),
    deberta=('Deberta', 'DebertaModel', SMALL, TEXT),
    deberta_v2=('DebertaV2', 'DebertaV2Model', SMALL, TEXT),
    distilbert=('DistilBert', 'DistilBertModel', dict(dim=64, n_layers=2, n_heads=4, hidden_dim=128,
        vocab_size=512), TEXT),
    electra=('Electra', 'ElectraModel', SMALL | dict(embedding_size=32), TEXT),
    modernbert=('ModernBert', 'ModernBertModel', SMALL | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2), TEXT),
    mpnet=('MPNet', 'MPNetModel', SMALL, TEXT),
    roberta=('Roberta', 'RobertaModel', SMALL, TEXT),
    squeezebert=('SqueezeBert', 'SqueezeBertModel', SMALL | dict(embedding_size=64), TEXT),
    bloom=('Bloom', 'BloomForCausalLM', dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=512,
        use_cache=False), TEXT),
    falcon=('Falcon', 'FalconForCausalLM', SMALL | dict(use_cache=False), TEXT),
    gemma=('Gemma', 'GemmaForCausalLM', GROUPS | dict(head_dim=16), TEXT),
    gemma2=('Gemma2', 'Gemma2ForCausalLM', GROUPS | dict(head_dim=16), TEXT),
    gpt2=('GPT2', 'GPT2LMHeadModel', _gpt(), TEXT),
    gpt_neo=('GPTNeo', 'GPTNeoForCausalLM', dict(hidden_size=64, num_layers=2, num_heads=4, vocab_size=512,
        max_position_embeddings=64, attention_types=[[['global', 'local'], 1]], use_cache=False), TEXT),
    gpt_neox=('GPTNeoX', 'GPTNeoXForCausalLM', SMALL | dict(use_cache=False), TEXT),
    gptj=('GPTJ', 'GPTJForCausalLM', _gpt(rotary_dim=8), TEXT),
    granite=('Granite', 'GraniteForCausalLM', GROUPS, TEXT),
    llama=('Llama', 'LlamaForCausalLM', GROUPS, TEXT),
    mamba=('Mamba', 'MambaForCausalLM', dict(hidden_size=64, num_hidden_layers=2, vocab_size=512, state_size=8,
        use_cache=False), TEXT),
    mistral=('Mistral', 'MistralForCausalLM', GROUPS, TEXT),
    mixtral=('Mixtral', 'MixtralForCausalLM', GROUPS | dict(num_local_experts=4, num_experts_per_tok=2,
        experts_implementation='batched_mm'), TEXT),
    olmo2=('Olmo2', 'Olmo2ForCausalLM', GROUPS, TEXT),
    opt=('OPT', 'OPTForCausalLM', dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128,
        vocab_size=512, word_embed_proj_dim=64, max_position_embeddings=64, use_cache=False), TEXT),
    phi=('Phi', 'PhiForCausalLM', GROUPS, TEXT),
    phi3=('Phi3', 'Phi3ForCausalLM', GROUPS | dict(pad_token_id=0), TEXT),
    qwen2=('Qwen2', 'Qwen2ForCausalLM', GROUPS, TEXT),
    qwen3=('Qwen3', 'Qwen3ForCausalLM', GROUPS | dict(head_dim=16), TEXT),
    qwen3_moe=('Qwen3Moe', 'Qwen3MoeForCausalLM', GROUPS | dict(head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, experts_implementation='batched_mm'), TEXT),
    stablelm=('StableLm', 'StableLmForCausalLM', GROUPS, TEXT),
    bart=('Bart', 'BartModel', _seq(max_position_embeddings=64), 'pair'),
    pegasus=('Pegasus', 'PegasusModel', _seq(max_position_embeddings=64), 'pair'),
    t5=('T5', 'T5Model', dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=512,
        use_cache=False), 'pair'),
    whisper=('Whisper', 'WhisperModel', _seq(num_mel_bins=16, max_source_positions=32, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1), 'mel'),
    beit=('Beit', 'BeitModel', SMALL | dict(image_size=32, patch_size=8), 'image'),
    clip=('CLIP', 'CLIPModel', dict(text_config=SMALL | dict(max_position_embeddings=64),
        vision_config=SMALL | dict(image_size=32, patch_size=8), projection_dim=32), 'both'),
    convnext=('ConvNext', 'ConvNextForImageClassification', dict(hidden_sizes=[16, 32, 64, 128]), 'image'),
    deit=('DeiT', 'DeiTModel', SMALL | dict(image_size=32, patch_size=8), 'image'),
    dinov2=('Dinov2', 'Dinov2Model', SMALL | dict(image_size=32, patch_size=8), 'image'),
    mobilevit=('MobileViT', 'MobileViTForImageClassification', dict(image_size=64, hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 96], num_attention_heads=4), 'image64'),
    resnet=('ResNet', 'ResNetForImageClassification', dict(embedding_size=16, hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1], layer_type='basic'), 'image'),
    segformer=('Segformer', 'SegformerModel', dict(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        decoder_hidden_size=32), 'image64'),
    swin=('Swin', 'SwinModel', dict(image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4],
        window_size=4), 'image'),
    vit=('ViT', 'ViTModel', SMALL | dict(image_size=32, patch_size=8), 'image'),
    hubert=('Hubert', 'HubertModel', SMALL | dict(conv_dim=[32]*7, num_feat_extract_layers=7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4), 'sound'),
    wav2vec2=('Wav2Vec2', 'Wav2Vec2Model', SMALL | dict(conv_dim=[32]*7, num_feat_extract_layers=7,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4), 'sound'),
)

def a_batch(kind):
    "What such a network takes, by name."
    import torch
    def words(n=12): return torch.randint(3, 512, (4, n))
    if kind == TEXT: return dict(input_ids=words())
    if kind == 'pair': return dict(input_ids=words(), decoder_input_ids=words(7))
    if kind == 'mel': return dict(input_features=torch.randn(4, 16, 64), decoder_input_ids=words(7))
    if kind == 'sound': return dict(input_values=torch.randn(4, 1600))
    size = 64 if kind == 'image64' else 32
    images = dict(pixel_values=torch.randn(4, 3, size, size))
    return images | dict(input_ids=words()) if kind == 'both' else images

def from_transformers(name):
    "A tiny network of transformers and two batches."
    import torch
    import transformers
    config,model,options,kind = NETWORKS[name]
    options = dict(options)
    experts = options.pop('experts_implementation', None)
    made = getattr(transformers, f'{config}Config')(**options)
    if experts: made._experts_implementation = experts
    model,batches = getattr(transformers, model)(made),[a_batch(kind) for _ in range(2)]
    if any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()):
        with torch.no_grad(): model(**batches[0])   # the statistics: without them nothing is left of the input
    return model.eval(),batches

def every():
    "The names of all networks, by library."
    of_vision = torchvision().models.list_models(module=torchvision().models)
    return dict(torchvision=[n for n in of_vision if not n.startswith('quantized_')], transformers=[*NETWORKS])

# --- what the runtime runs
PRODUCTS = {'MatMul', 'FusedMatMul', 'Gemm', 'FusedGemm', 'QGemm', 'MatMulInteger', 'MatMulIntegerToFloat',
    'QLinearMatMul', 'DynamicQuantizeMatMul', 'MatMulNBits', 'TransposeMatMul', 'Einsum'}
CONVOLUTIONS = {'Conv', 'FusedConv', 'NhwcFusedConv', 'QLinearConv', 'ConvInteger', 'NhwcConv'}
INTEGER = {'QGemm', 'MatMulInteger', 'MatMulIntegerToFloat', 'QLinearMatMul', 'DynamicQuantizeMatMul', 'QLinearConv',
    'ConvInteger'}                              # MatMulNBits multiplies floats: a share of its own
QUIET = {'LSTM', 'GRU', 'RNN', 'ConvTranspose', 'Attention', 'MultiHeadAttention', 'QAttention'}

def shapes_of(tensors): return [next(iter(t.values())) for t in tensors]

def products_of(node, weights, inputs, outputs):
    "Multiplications of one call of a node, from its shapes; weights that the kernel has packed are only in the graph."
    op,made = node.op_type,math.prod(outputs[0])
    if op in CONVOLUTIONS:
        name = node.input[3 if op == 'QLinearConv' else 1]
        weight = weights[name] if name in weights else inputs[1]
        return made*math.prod(weight[1:])
    if op in ('Gemm', 'FusedGemm', 'QGemm'): return made*math.prod(inputs[0])//outputs[0][0]
    if op == 'Einsum':
        terms = next(a.s for a in node.attribute if a.name == 'equation').decode().replace(' ', '').partition('->')[0]
        return math.prod({k: n for term,shape in zip(terms.split(','), inputs) for k,n in zip(term, shape)}.values())
    turned = any(a.name == 'transA' and a.i for a in node.attribute)
    return made*inputs[0][-2 if turned else -1]

def kernels(profile, graph):
    "Multiplications of each operator, in the runtime's own record of a run of the graph it has optimized."
    nodes = {node.name: node for node in graph.node}
    weights = {t.name: tuple(t.dims) for t in graph.initializer}
    found = Counter()
    for event in json.loads(Path(profile).read_text('utf-8')):
        args,name = event.get('args', {}),event.get('name', '')
        op = args.get('op_name')
        if not name.endswith('_kernel_time') or op is None: continue
        if op in QUIET: raise ValueError(f'the multiplications of {op} are not counted')
        if op not in PRODUCTS | CONVOLUTIONS: continue
        node = nodes[name.removesuffix('_kernel_time')]
        inputs,outputs = shapes_of(args['input_type_shape']),shapes_of(args['output_type_shape'])
        found[op] += products_of(node, weights, inputs, outputs)
    return found

# --- one row
def gap(found, wanted):
    "The largest difference of several outputs, each over its largest value."
    def one(a, b):
        a,b = a.double(),b.double()
        return ((a-b).abs().amax()/b.abs().amax().clamp(min=1e-30)).item()
    return max(one(a, b) for a,b in zip(found, wanted, strict=True) if b.is_floating_point() and b.numel())

def differ(found, wanted):
    "The share of outputs that are apart by more than the last bits."
    far = total = 0
    for a,b in zip(found, wanted, strict=True):
        far += ((a.double()-b.double()).abs() > 1e-5*b.double().abs().amax()).sum().item()
        total += b.numel()
    return far/total

@contextmanager
def stage(row, name):
    "An error says where it happened."
    row['stage'] = name
    began = time.perf_counter()
    yield
    row['seconds'][name] = round(time.perf_counter()-began, 2)

def integer_share(file, given):
    "Multiplications by kernel in the graph that the runtime makes of a file, and the share of those on integers."
    import onnx
    import onnxruntime as ort
    options = ort.SessionOptions()
    options.enable_profiling,options.intra_op_num_threads,options.log_severity_level = True,1,3
    options.profile_file_prefix = str(Path(file).with_name('profile'))
    options.optimized_model_filepath = str(Path(file).with_name('optimized.onnx'))
    options.add_session_config_entry('session.qdq_matmulnbits_accuracy_level', '1')
    traced = ort.InferenceSession(str(file), options, providers=['CPUExecutionProvider'])
    traced.run(None, given)
    graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    by_kernel = kernels(traced.end_profiling(), graph)
    total = sum(by_kernel.values())
    share = {op: round(n/total, 4) for op,n in by_kernel.most_common()}
    return share,round(sum(n for op,n in by_kernel.items() if op in INTEGER)/total, 4)

def computed(file, feed):
    "What the file is given, and what the runtime computes of it."
    import torch
    from shok_nb import onnx_session
    run = onnx_session(file)
    given = {k.name: feed[k.name].numpy() for k in run.get_inputs()}
    return given,[torch.as_tensor(a) for a in run.run(None, given)]

def run_onnx(file, feed, row):
    "What the runtime computes, and the kernels it uses."
    given,found = computed(file, feed)
    row['kernels'],row['integer'] = integer_share(file, given)
    return found

def seconds_of(files, given, rounds=30):
    """The median time that a run of each file takes of the processor, in one thread. Each round has its own order, so
    each file is as often the first behind a large one, whose weights fill the caches, as any other."""
    import onnxruntime as ort
    options = ort.SessionOptions()
    options.intra_op_num_threads,options.log_severity_level = 1,3
    providers = ['CPUExecutionProvider']
    runs = {k: ort.InferenceSession(str(f), options, providers=providers) for k,f in files.items()}
    took = {k: [] for k in runs}
    orders = itertools.cycle(itertools.permutations(runs))
    for order in itertools.islice(orders, rounds):
        for k in order:
            began = time.process_time()
            runs[k].run(None, given)
            took[k].append(time.process_time()-began)
    return {k: statistics.median(v) for k,v in took.items()}

def beside_floats(files, name, like, many=64):
    """On many batches that nobody has calibrated with: the error of each file over the size of the outputs of the
    first, both as root mean squares, and the share of inputs whose largest output is that of the first file."""
    import torch
    from shok_nb import onnx_session
    runs = {k: onnx_session(f) for k,f in files.items()}
    g = torch.Generator().manual_seed(5)
    batches = [torch.randn(like.shape, generator=g) for _ in range(many)]
    def answers(run): return torch.cat([torch.as_tensor(run.run(None, {name: x.numpy()})[0]) for x in batches]).double()
    wanted,*found = map(answers, runs.values())
    def off(a): return ((a-wanted).square().mean()/wanted.square().mean()).sqrt().item()
    def agrees(a): return (a.argmax(1) == wanted.argmax(1)).double().mean().item()
    return {k: dict(rms=round(off(a), 5), agrees=round(agrees(a), 4)) for k,a in zip([*runs][1:], found)}

def in_floats(model, batch, file):
    "Writes a network to this file as it is. Returns the name of its input."
    from shok_nb import onnx_session, to_onnx
    to_onnx(model, batch, file, any_batch=False)
    return onnx_session(file).get_inputs()[0].name

def time_of_floats(model, batches, ours, row):
    "The time of a session, where that of floats is 1."
    floats = Path(ours).with_name('floats.onnx')
    name = in_floats(model, batches[0], floats)
    best = seconds_of(dict(floats=floats, ours=Path(ours)), {name: batches[0].numpy()})
    row['time'] = round(best['ours']/best['floats'], 3)

def beside_static(model, batches, ours, row):
    "The same network by the runtime's own `quantize_static`, from the same batches: share, error, agreement and time."
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process
    folder = Path(ours).parent
    files = {k: folder/k/'model.onnx' for k in ('floats', 'prepared', 'static')} | dict(ours=Path(ours))
    for f in files.values(): f.parent.mkdir(exist_ok=True)
    name = in_floats(model, batches[0], files['floats'])
    class Batches(q.CalibrationDataReader):
        def __init__(self): self.left = iter(batches)
        def get_next(self):
            x = next(self.left, None)
            return None if x is None else {name: x.numpy()}
    given,why = {name: batches[0].numpy()},None
    try:
        quant_pre_process(str(files['floats']), str(files['prepared']))
        q.quantize_static(str(files['prepared']), str(files['static']), Batches(), per_channel=True,
            quant_format=q.QuantFormat.QDQ, activation_type=q.QuantType.QUInt8, weight_type=q.QuantType.QInt8)
    except Exception as e: why = told(e)                    # whatever fails in a program of others
    made = {k: files[k] for k in ('floats', 'ours', 'static') if not (why and k == 'static')}
    best = seconds_of(made, given)
    row['time'] = round(best['ours']/best['floats'], 3)
    if why:
        row['static_fails'] = why
        return
    beside = beside_floats(made, name, batches[0])
    row |= beside['ours']
    row['static'] = beside['static'] | dict(integer=integer_share(files['static'], given)[1],
        time=round(best['static']/best['floats'], 3))

def quantized(model, setting, batches):
    import shok_nb as R
    if setting != SETTINGS[1]:
        bits = int(setting[0])
        return R.quantize_model_(model, bits, bits, calibrate=batches)
    return R.quantize_model_(model, R.Quantizer(4, block=32), None)

# --- codes that are others in the runtime
class InRuntime:
    "All codes of activations in the runtime: for each grid those of every QuantizeLinear on it, with its place."
    def __init__(self, file, feed):
        import onnx
        import torch
        from onnx import numpy_helper
        model,telling = onnx.load(str(file)),Path(file).with_name('codes.onnx')
        made = [n for n in model.graph.node if n.op_type == 'QuantizeLinear']
        clipped = {n.input[0]: n.output[0] for n in model.graph.node if n.op_type == 'Clip'}
        codes = [clipped.get(n.output[0], n.output[0]) for n in made]
        for k in codes: model.graph.output.append(onnx.helper.make_empty_tensor_value_info(k))
        onnx.save(model, telling)
        _,values = computed(telling, feed)
        held = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
        self.outputs,self.codes = values[:-len(made)],{}
        for at,(n,v) in enumerate(zip(made, values[-len(made):], strict=True)):
            scale,code = (held[k].item() for k in n.input[1:3])
            low = torch.iinfo(v.dtype).min
            self.codes.setdefault((scale, code-low), []).append((at, v.int()-low))
        self.last = -1

    def like(self, codes, scale, code):
        "Of those on a grid the ones that are nearest to the codes of torch, and then the next in their order."
        def far(found): return (found[1].view(codes.shape) != codes).sum().item(),abs(found[0]-self.last-1)
        found = [f for f in self.codes.get((scale.item(), int(code)), []) if f[1].numel() == codes.numel()]
        if not found: return None
        self.last,v = min(found, key=far)
        return v.view(codes.shape).to(codes.dtype)

class Ties:
    "How many codes are others in the runtime, and how far in steps, at most, torch's sums lay from a tie there."
    def __init__(self, runtime): self.runtime,self.counted,self.flipped,self.farthest = runtime,0,0,0.

    def taken(self, steps, codes, scale, code):
        "The codes of the runtime in place of torch's own, which are those of `steps`."
        theirs = self.runtime.like(codes, scale, code)
        if theirs is None: return codes
        other = theirs != codes
        off = ((steps.double()-steps.double().floor()-.5).abs() + (theirs-codes).abs()-1)[other]
        self.counted += codes.numel()
        self.flipped += len(off)
        self.farthest = max(self.farthest, *off.tolist(), 0.)
        return theirs

    @contextmanager
    def in_place(self, model):
        "While this lasts, the deployed `model` goes on with the codes of the runtime."
        from unittest.mock import patch
        from shok_nb import Quantizer
        from shok_nb.deployment import integer_layers, integer_operations
        within = integer_layers.clamp_codes
        def rounded(steps, scale, code, top):
            return self.taken(steps, within(steps.round()+code, top), scale, code)
        def entering(m, x):
            scale,code = m.input_scale,m.input_zero_point.float()
            return rounded(x.float()/scale, scale, code, m.input_top) - code
        def leaving(m, total):
            if m.out_scale is None: return total*m.beside_sums(m.product)
            scale,code = m.out_scale,m.out_zero_point.float()
            return (rounded(total*m.beside_sums(m.product/scale), scale, code, m.out_top)-code)*scale
        def enters(m, x, i=0):
            scale,code = m.grid_entering(i)
            return rounded(x.float()/scale, scale, code.float(), m.top_entering(i))
        steps = []
        def noted(v): return steps.append(v) or v.round()
        def run(m, *xs):
            steps.clear()
            codes = within(m._codes(*[m.codes_entering(x, i) for i,x in enumerate(xs)]), m.out_top)
            last = steps[-1] if steps[-1].shape == codes.shape else codes      # a concatenation has several
            scale,code = m.out_scale,m.out_zero_point.float()
            return (self.taken(last, codes, scale, code)-code)*scale
        def on_grid(m, x):
            (scale,code),(low,high) = m.grid(),m.range()
            code = (0 if code is None else code) - low
            return (rounded(x/scale, scale, code, high-low)-code)*scale
        inputs = [getattr(m, 'input_quantizer', None) for m in model.modules()]
        sums,operator = integer_layers._Sums,integer_operations._Operator
        with (patch.object(sums, 'codes_entering', entering), patch.object(sums, '_leaving', leaving),
              patch.object(operator, 'codes_entering', enters), patch.object(operator, '_run', run),
              patch.object(integer_operations, 'round_ste', noted)):
            quantizers = [q for q in inputs if isinstance(q, Quantizer) and q.range()[1]-q.range()[0] == 255]
            for q in quantizers: q.forward = types.MethodType(on_grid, q)
            try: yield
            finally:
                for q in quantizers: vars(q).pop('forward', None)

EXPLAIN = 1e-3
def ties(model, batch, file, feed, found):
    "What is left of the difference between the runtime and torch when torch takes the codes of the runtime."
    import torch
    from shok_nb.networks import flow
    runtime = InRuntime(file, feed)
    if not all(map(torch.equal, runtime.outputs, found)): raise ValueError('outputs change when codes are outputs')
    seen = Ties(runtime)
    with torch.no_grad(), seen.in_place(model): alike = [*flow.tensors_of(flow.feed(model, batch))]
    counts = dict(codes=seen.counted, flipped=seen.flipped, farthest=seen.farthest)
    return counts | dict(left=gap(found, alike))

def bytes_of(model, unknown):
    "Of the Parameters that a report names as not known."
    def named(n, told): return [f'{n}.{k}' for k in told.removeprefix('not known: ').split(', ')]
    held = [model.get_parameter(k.removeprefix('(model).')) for n,told in unknown.items() for k in named(n, told)]
    return sum(p.numel()*p.element_size() for p in held)

def measured(name, setting, row, folder):
    "Fills the row of a network, as far as it comes."
    import torch
    import shok_nb as R
    from shok_nb.networks import flow
    torch.manual_seed(0)
    torch.set_num_threads(1)
    row['seconds'] = {}
    with stage(row, 'make'): model,batches = (from_transformers if name in NETWORKS else from_torchvision)(name)
    def outputs():
        with torch.no_grad(): return [t.clone() for t in flow.tensors_of(flow.feed(model, batches[0]))]
    floats = outputs()
    compares = name in FAMILIES and setting != SETTINGS[1]
    before = copy.deepcopy(model) if compares else None
    row['parameters'] = sum(p.numel() for p in model.parameters())
    held = sum(t.numel()*t.element_size() for t in (*model.parameters(), *model.buffers()))
    with stage(row, 'quantize_model_'): report = quantized(model, setting, batches)
    row['layers'] = len(report.rows)
    unknown = {r.name: r.weights for r in report.rows if r.weights.startswith('not known: ')}
    row['unknown'] = [f'{n}: {told}' for n,told in unknown.items()]
    rounded = outputs()
    row['quantized'] = gap(rounded, floats)
    with stage(row, 'deploy_'): report = R.deploy_(model, batches[0])
    row['notes'] = report.note
    row['floats'] = dict(Counter(r.activations for r in report.rows if not r.activations.startswith('codes')))
    deployed = outputs()
    row['deployed'] = gap(deployed, rounded)
    file = folder/'model.onnx'
    with stage(row, 'to_onnx'): R.to_onnx(model, batches[0], file, any_batch=False)
    size = sum(f.stat().st_size for f in folder.iterdir())
    row['size'] = round(size/held, 4)
    if unknown: row['unknown_size'] = round(bytes_of(model, unknown)/size, 4)
    feed = batches[0] if isinstance(batches[0], dict) else dict(x=batches[0])
    with stage(row, 'runtime'): found = run_onnx(file, feed, row)
    row['runtime'],row['flips'] = gap(found, deployed),differ(found, deployed)
    if row['flips'] and setting != SETTINGS[1]: row['ties'] = ties(model, batches[0], file, feed, found)
    if before is not None:
        beside = beside_static if setting == SETTINGS[0] else time_of_floats
        with stage(row, 'static'): beside(before, batches, file, row)
    del row['stage']

def told(e):
    "An error in a line, without the paths of a machine."
    line = re.sub(r'\x1b\[[0-9;]*m', '', str(e)).strip()       # colours
    line = (line or type(e).__name__).splitlines()[0]
    return f'{type(e).__name__}: {line.replace(str(Path.home()), "~")}'[:300]

def worker(name, setting, pipe):
    "Measures one row in a process of its own and sends it."
    row = dict(library='transformers' if name in NETWORKS else 'torchvision', model=name, setting=setting)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    with tempfile.TemporaryDirectory() as folder:
        try: measured(name, setting, row, Path(folder))
        except Exception as e: row['error'] = told(e)
    pipe.send(row)

def one(name, setting):
    "The row of a network; a process that dies or takes too long has a row too."
    ours,theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context('fork').Process(target=worker, args=(name, setting, theirs))
    process.start()
    theirs.close()
    row = dict(library='transformers' if name in NETWORKS else 'torchvision', model=name, setting=setting)
    try:
        if ours.poll(LIMIT): return ours.recv()
        return row | dict(error=f'more than {LIMIT} seconds')
    except EOFError: return row | dict(error='the process died')
    finally:
        if process.is_alive(): process.join(5)
        if process.is_alive(): os.kill(process.pid, signal.SIGKILL)
        process.join()

# --- the table
def read():
    return json.loads(TABLE.read_text('utf-8')) if TABLE.exists() else dict(versions={}, rows=[])

def write(table):
    "One row on a line, sorted."
    order = sorted(table['rows'], key=lambda r: (r['library'], r['model'], SETTINGS.index(r['setting'])))
    rows = ',\n'.join('  '+json.dumps(r) for r in order)
    TABLE.write_text(f'{{"versions": {json.dumps(table["versions"])},\n "rows": [\n{rows}\n]}}\n', 'utf-8')

def wanted(options, table):
    "The networks and settings to measure now."
    names = every()
    known = names['torchvision'] + names['transformers']
    if strange := set(options.names)-set(known): raise SystemExit(f'zoo.py: no network is named {", ".join(strange)}')
    done = {(r['model'], r['setting']): r for r in table['rows']}
    pick = options.names or (known if options.all else [*names['transformers'], *FAMILIES])
    pairs = [(n, s) for n in pick for s in SETTINGS if s != SETTINGS[2] or n in FOUR_BITS]
    if options.failed: return [p for p in done if 'error' in done[p] and (not options.names or p[0] in options.names)]
    return pairs if options.names else [p for p in pairs if p not in done]

def shown(row):
    "A row on the screen."
    if 'error' in row: return f"{row['stage'] if 'stage' in row else ''}: {row['error']}"
    said = ' '.join(f'{k} {row[k]:.3g}' for k in ('quantized', 'deployed', 'runtime', 'flips', 'integer', 'size'))
    if 'time' in row: said += f" time {row['time']:.2f}"
    if 'static' not in row: return said
    return f"{said}; quantize_static {row['static']}"

def main():
    import onnxruntime
    import torch
    import transformers
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', help='networks to measure again')
    parser.add_argument('--all', action='store_true', help='every network of torchvision')
    parser.add_argument('--failed', action='store_true', help='those that failed')
    options = parser.parse_args()
    table = read()
    versions = {m.__name__: m.__version__.partition('+')[0] for m in (torch, torchvision(), transformers, onnxruntime)}
    table['versions'] = versions | dict(python=platform.python_version())
    for name,setting in wanted(options, table):
        row = one(name, setting)
        row['date'] = time.strftime('%Y-%m-%d')
        table['rows'] = [r for r in table['rows'] if (r['model'], r['setting']) != (name, setting)] + [row]
        write(table)
        print(f'{name:24} {setting:18}', shown(row), flush=True)
    rows = table['rows']
    failed = [r for r in rows if 'error' in r]
    print(f'{len(rows)} rows, {len(failed)} of them failed; written to bench/zoo.json')

if __name__ == '__main__': main()
