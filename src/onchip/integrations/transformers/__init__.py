"""Run the models of Hugging Face transformers on onchip.

    import onchip.integrations.transformers
    onchip.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="onchip")

`import onchip` loads neither this module nor transformers.
"""

from onchip.integrations.transformers.registration import register

__all__ = ["register"]
