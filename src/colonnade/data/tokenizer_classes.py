"""Which class of transformers reads the text of a model that names none, as its `TOKENIZER_MAPPING_NAMES` has it (and
had it for longt5, before 5.0). Only of classes that do not treat text as the usual one for their kind of file does.
"""

from __future__ import annotations

from collections.abc import Mapping

_MODELS: Mapping[str, str] = {
    "AlbertTokenizer": "albert yoso",
    "BarthezTokenizer": "barthez",
    "BartphoTokenizer": "bartpho",
    "BertJapaneseTokenizer": "bert-japanese",
    "BioGptTokenizer": "biogpt",
    "BlenderbotSmallTokenizer": "blenderbot-small",
    "BlenderbotTokenizer": "blenderbot",
    "CLIPTokenizer": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
    "CTRLTokenizer": "ctrl",
    "CamembertTokenizer": "camembert",
    "ClvpTokenizer": "clvp",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "CpmTokenizer": "cpm",
    "FNetTokenizer": "fnet",
    "FSMTTokenizer": "fsmt",
    "FlaubertTokenizer": "flaubert",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "HerbertTokenizer": "herbert",
    "LayoutXLMTokenizer": "layoutxlm",
    "M2M100Tokenizer": "m2m_100",
    "MBart50Tokenizer": "mbart50",
    "MBartTokenizer": "mbart",
    "MLukeTokenizer": "mluke",
    "NllbTokenizer": "nllb nllb-moe",
    "NougatTokenizer": "nougat pp_formulanet",
    "OpenAIGPTTokenizer": "openai-gpt",
    "PLBartTokenizer": "plbart",
    "PegasusTokenizer": "pegasus",
    "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
    "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
    "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "RoFormerTokenizer": "roformer",
    "SeamlessM4TTokenizer": "seamless_m4t seamless_m4t_v2",
    "SiglipTokenizer": "siglip",
    "Speech2TextTokenizer": "speech_to_text",
    "T5Tokenizer": "longt5 mt5 musicgen musicgen_melody switch_transformers t5",
    "XGLMTokenizer": "xglm",
    "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    "XLMTokenizer": "xlm",
    "XLNetTokenizer": "xlnet",
}
OF_MODELS: Mapping[str, str] = {kind: name for name, kinds in _MODELS.items() for kind in kinds.split()}
"""By the model_type of config.json."""
