import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Chat:
    def __init__(self, name):
        self.tok = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16, device_map="auto").eval()

    @torch.inference_mode()
    def reply(self, prompt, max_new_tokens=128):
        batch = self.tok(prompt, return_tensors="pt").to(self.model.device)
        out = self.model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=True, top_p=0.9)
        return self.tok.decode(out[0, batch["input_ids"].size(1) :], skip_special_tokens=True)


if __name__ == "__main__":
    chat = Chat("some-org/tiny-chat")
    while True:
        print(chat.reply(input("> ")))
