"""An application of the stranger's own: it knows the `openai` client, and a URL."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], max_retries=0, timeout=120)  # the key is in OPENAI_API_KEY
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}}
question = {"role": "user", "content": "What is the weather in Paris, in celsius?"}

asked = client.chat.completions.create(
    model="chat", messages=[question], tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    temperature=0, max_tokens=120,
)  # fmt: skip
(call,) = asked.choices[0].message.tool_calls
arguments = json.loads(call.function.arguments)
assert call.function.name == "get_weather", call
assert set(arguments) == {"city", "unit"}, arguments

said = asked.choices[0].message.model_dump(exclude_none=True)
result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
told = client.chat.completions.create(
    model="chat", messages=[question, said, result], tools=[TOOL], temperature=0, max_tokens=24
)
assert told.choices[0].message.content or told.choices[0].message.tool_calls, told

schema = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
shaped = client.chat.completions.create(
    model="chat", messages=[question], response_format=schema, temperature=0, max_tokens=60
)
answer = json.loads(shaped.choices[0].message.content)
assert set(answer) == {"city", "unit"}, answer
assert answer["unit"] in WEATHER["properties"]["unit"]["enum"], answer

pieces = client.chat.completions.create(
    model="chat", messages=[question], temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
chunks = list(pieces)
assert len(chunks) > 8, chunks
assert chunks[-1].usage.completion_tokens == 16, chunks[-1]
print(json.dumps({"tool": arguments, "json": answer}))
