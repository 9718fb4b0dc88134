"""Contents of config.json files: a small Llama, and what names the other families."""

RAW = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=19,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
)
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral")
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
GEMMA2 = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2")
GEMMA3 = dict(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text")
