"""Ask a server with OpenAI's client: python examples/client.py [URL]

Start one before: lopa serve demo. The client: pip install openai.
"""

import sys

try:
    from openai import OpenAI, OpenAIError
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install openai")

QUESTION = "Tom has 12 apples and buys 5 more. How many apples does he have now?"


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="any")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        extra_body={"diffusion": {"num_lookahead": 2}},  # at most what the server was started with
    )
    for chunk in stream:  # what no later pass can change, after each pass
        print(chunk.choices[0].delta.content or "", end="", flush=True)

    answer = client.completions.create(
        model=model, prompt=f"{QUESTION}\n", max_tokens=64, extra_body={"diffusion": {"stats": True}}
    )
    print(f"\n{answer.choices[0].finish_reason}: {answer.model_extra['diffusion']}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:  # no server there, or one that refuses
        sys.exit(f"{error} Is a server running there? Start one: lopa serve demo")
