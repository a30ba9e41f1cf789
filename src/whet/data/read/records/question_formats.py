"""Formats of a question and its answer: alpaca, prompt-completion, gsm8k, multiple-choice."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

from whet.core.errors import BadRecordError
from whet.data.conversation import (
    CALCULATOR_SCHEMA,
    ROLES,
    CalculatorStep,
    Conversation,
    Message,
    Origin,
    calculator_messages,
)
from whet.data.read.records.messages import make_conversation, parse_message_list
from whet.data.read.records.record_fields import (
    EMPTY_VALUES,
    decode_list,
    describe_type,
    find_optional,
    match_fields,
    require_field,
    require_nonempty,
    require_object,
    require_text,
    shorten,
)
from whet.data.read.records.sharegpt import SHAREGPT_CALLS, SHAREGPT_ROLES

# alpaca: {"instruction": "…", "input": "…", "output": "…"}.
#
# The user turn is the instruction and, after a blank line, the input. `history` is a list of earlier [question, answer]
# pairs.

ALPACA_FIELDS = {"instruction": ("instruction",), "output": ("output", "response")}
ALPACA_OPTIONAL = {"input": ("input", "context"), "history": ("history",)}
_ALPACA_EXAMPLE = '{"instruction": "…", "input": "…", "output": "…"}'


def recognise_alpaca(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    return match_fields(record, ALPACA_FIELDS, ("instruction", "output"), fields)


def parse_alpaca(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    record = require_object(record, _ALPACA_EXAMPLE)
    instruction = require_text(require_field(record, names["instruction"]), f"'{names['instruction']}'")
    name, value = find_optional(record, "input", ALPACA_OPTIONAL["input"], names)
    context = "" if value is None else require_text(value, f"'{name}'")
    prompt = "\n\n".join(text for text in (instruction, context) if text.strip())
    messages = [
        *_alpaca_history(*find_optional(record, "history", ALPACA_OPTIONAL["history"], names)),
        Message("user", require_nonempty(prompt, f"'{names['instruction']}'")),
        Message("assistant", require_nonempty(_require_answer(record, names["output"]), f"'{names['output']}'")),
    ]
    return make_conversation(messages, record, names, origin)


def _require_answer(record: Mapping[str, Any], name: str) -> Any:
    answer = require_field(record, name)
    if isinstance(answer, list) and answer and all(isinstance(each, str) for each in answer):
        raise BadRecordError(
            "several answers",
            f"{name!r} is a list of {len(answer)} answers, as in preference data. Keep one, as text, or write a "
            "record for each",
        )
    return answer


def _alpaca_history(name: str, history: Any) -> list[Message]:
    pairs = decode_list(history, f"'{name}'")
    if pairs in EMPTY_VALUES:
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRecordError(
            "bad history", f"'{name}' must be a list of [question, answer] pairs, not {describe_type(pairs)}"
        )
    messages = []
    for number, (question, answer) in enumerate(pairs, 1):
        messages.append(Message("user", require_nonempty(question, f"question {number} of '{name}'")))
        messages.append(Message("assistant", require_nonempty(answer, f"answer {number} of '{name}'")))
    return messages


# prompt-completion: {"prompt": "…", "completion": "…"}; both may be messages, or turns of sharegpt.
#
# Strings become a user and an assistant turn. Assistant turns of a prompt that is a list are context: not supervised.

PROMPT_COMPLETION_FIELDS = {
    "prompt": ("prompt", "question", "query", "input", "problem"),
    "completion": ("completion", "answer", "response", "output", "solution"),
}
QUESTION_WORDS = """
    frage anfrage eingabe pregunta consulta entrada domanda richiesta pergunta vraag pytanie вопрос запрос питання
    问题 問題 提问 質問 入力 질문 fråga spørsmål spørgsmål kysymys soru otázka kérdés întrebare ερώτηση سؤال שאלה प्रश्न
    câu_hỏi pertanyaan คำถาม requête demande entrée 输入 user human user_message user_input human_message inputs
"""
ANSWER_WORDS = """
    antwort ausgabe réponse sortie respuesta salida risposta resposta saída antwoord odpowiedź ответ відповідь 答案 回答
    答复 解答 出力 输出 답변 대답 svar vastaus cevap yanıt odpověď odpoveď válasz răspuns απάντηση جواب إجابة תשובה उत्तर
    câu_trả_lời trả_lời jawaban คำตอบ assistant bot gpt assistant_message bot_message model_output reply target targets
"""
CONTEXT_WORDS = """
    kontext hintergrund contexto contexte contesto kontekst контекст bağlam context_text background passage_text
    上下文 背景 文脈 문맥 samenhang sammanhang konteksti kontextus πλαίσιο سياق הקשר संदर्भ ngữ_cảnh konteks บริบท
"""
INSTRUCTION_WORDS = """
    anweisung instruktion instrucción instrucciones istruzione instrução instructie instrukcja инструкция інструкція
    指令 指示 명령 지시 talimat instrukce utasítás instrucțiune οδηγία تعليمات הוראה निर्देश hướng_dẫn instruksi คำสั่ง
"""
INPUT_WORDS = "eingabe entrada entrée input_text 输入 入力 입력 ввод wejście invoer indata vstup bemenet intrare giriş"
SYSTEM_WORDS = """
    systemprompt systemnachricht message_système invite_système mensaje_de_sistema mensagem_do_sistema
    messaggio_di_sistema 系统提示 系统提示词 システムプロンプト 시스템_프롬프트 системный_промпт
"""
"""Names of columns that mean a question, an answer, what belongs to the question, an instruction or a system message,
in several languages; whet proposes them, never assumes them."""
_PROMPT_COMPLETION_EXAMPLE = '{"prompt": "…", "completion": "…"}'
_PASSAGES = ("context", "contexts", "passage", "passages", "paragraph", "document", "documents")
MORE_THAN_A_PROMPT = ("instruction", "instructions", *_PASSAGES, "choices", "options", "history")
_NAME = re.compile(r"(?:[\w./:#-]*\w)?", re.ASCII)
CHOICE_COLUMN = re.compile(r"(?:option|choice|distractor|op)[_ ]?(?:[a-e]|[0-5])", re.IGNORECASE)
"""Fields that add to the question, so that the record is more than a prompt and a completion."""
_LETTERS = frozenset("ABCDEFabcdef")


def recognise_prompt_completion(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches; none if it has a field that adds to the prompt."""
    if not isinstance(record, dict) or find_addition(record, fields.values()) is not None:
        return []
    found = match_fields(record, PROMPT_COMPLETION_FIELDS, ("prompt", "completion"), fields)
    return [names for names in found if not _is_other_object(record[names["prompt"]])]


def _is_other_object(value: Any) -> bool:
    """Whether this is an object, but no message."""
    return isinstance(value, dict) and "role" not in value and "from" not in value


def find_addition(record: Mapping[str, Any], used: Collection[str]) -> str | None:
    """A field that adds to the prompt and is not used."""
    if (choices := lettered_choices(record)) and choices[0] not in used:
        return choices[0]
    for name, value in record.items():
        if value in EMPTY_VALUES or name in used or not isinstance(name, str):
            continue
        is_passage = name.strip().lower() in _PASSAGES
        if is_passage and isinstance(value, str) and is_name(value):
            continue
        if is_passage or name.strip().lower() in MORE_THAN_A_PROMPT or CHOICE_COLUMN.fullmatch(name):
            return name
    return None


def is_name(value: str) -> bool:
    """Whether a text is no passage but the name of one, or of a category: `manual.pdf`."""
    return _NAME.fullmatch(value.strip()) is not None


def lettered_choices(record: Mapping[str, Any]) -> list[str]:
    """The columns of choices that are named by letters: A, B, … or a, b, …"""
    letters = [name for name, value in record.items() if name in _LETTERS and value not in EMPTY_VALUES]
    return letters if {"A", "B"} <= {letter.upper() for letter in letters} else []


def parse_detected_prompt_completion(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record whose format was detected from others: what these lack must not be lost. Raises BadRecordError."""
    added = find_addition(record, names.values()) if isinstance(record, dict) else None
    if added is not None:
        fields = f"{{prompt: {names['prompt']}, completion: {names['completion']}}}"
        raise BadRecordError(
            "more than a prompt",
            f"the record has {added!r}, which the first records do not have and which belongs to the question. To add "
            f"it, set fields: {{instruction: {names['prompt']}, input: {added}, output: {names['completion']}}}; to "
            f"train without it, set format: prompt-completion and fields: {fields}",
        )
    return parse_prompt_completion(record, names, origin)


def parse_prompt_completion(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    record = require_object(record, _PROMPT_COMPLETION_EXAMPLE)
    prompt = _as_messages(require_field(record, names["prompt"]), names["prompt"], "user")
    completion = _as_messages(_require_answer(record, names["completion"]), names["completion"], "assistant")
    messages = parse_message_list(prompt + completion)
    if messages[len(prompt)].role == "user":
        raise BadRecordError(
            "bad completion",
            f"'{names['completion']}' begins with a question: it is a whole conversation. Set format: messages and "
            f"fields: {{messages: {names['completion']}}}",
        )
    context = [replace(turn, train=False) if turn.role == "assistant" else turn for turn in messages[: len(prompt)]]
    return make_conversation((*context, *messages[len(prompt) :]), record, names, origin)


def _as_messages(value: Any, name: str, role: str) -> list[Any]:
    value = decode_messages(value, f"'{name}'")
    if _is_other_object(value):
        keys = ", ".join(map(repr, value)) or "no keys"
        raise BadRecordError(
            "bad content",
            f"{name!r} must be text or messages, not an object with {keys[:80]}. Write its text in its place",
        )
    if isinstance(value, (list, dict)) and value:
        return [_as_message(turn) for turn in (value if isinstance(value, list) else [value])]
    return [{"role": role, "content": require_nonempty(value, f"'{name}'")}]


_WRITTEN_MESSAGE = re.compile(r"""\s*\[?\s*\{\s*["']\w""")
_WRITTEN_ROLE = re.compile(r"""["'](?:role|from)["']\s*:""")
_WRITTEN_LIST = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["'].*\}\s*\]\s*""", re.DOTALL)
_WRITTEN_ROLES = (*ROLES, *SHAREGPT_ROLES, *SHAREGPT_CALLS)


def decode_messages(value: Any, place: str = "") -> Any:
    """The messages that a text is, as tables and logs have them: JSON, or what pandas writes; else the value."""
    if not isinstance(value, str) or not _WRITTEN_MESSAGE.match(value) or not _WRITTEN_ROLE.search(value):
        return value
    try:
        turns = decode_list(value if value.lstrip().startswith("[") else f"[{value}]", place)
    except BadRecordError:
        if _WRITTEN_LIST.fullmatch(value):  # a list of messages that is damaged, or printed by numpy
            raise
        return value
    return turns if all(map(_is_message, turns)) else value


def _is_message(turn: Any) -> bool:
    if not isinstance(turn, dict) or turn.get("role", turn.get("from")) not in _WRITTEN_ROLES:
        return False
    has_calls = any(turn.get(name) not in EMPTY_VALUES for name in ("tool_calls", "function_call"))
    return has_calls or isinstance(turn.get("content", turn.get("value")), (str, list))


def _as_message(turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn or "role" in turn:
        return turn
    return {**turn, "role": SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}


# gsm8k: a question, and an answer with calculations such as <<48/2=24>> that ends with a line `#### 24`.

GSM8K_FIELDS = {"question": ("question",), "answer": ("answer",)}
_GSM8K_EXAMPLE = '{"question": "…", "answer": "… <<48/2=24>>24 …\\n#### 24"}'
_GSM8K_CALCULATION = re.compile(r"<<(.*?)>>", re.DOTALL)
_GSM8K_RESULT = "####"


def recognise_gsm8k(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    found = match_fields(record, GSM8K_FIELDS, ("question", "answer"), fields)
    return [names for names in found if _has_gsm8k_result(record[names["answer"]])]


def parse_gsm8k(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """The answer as plain text, without the <<…>> annotations."""
    question, answer = _gsm8k_question_and_answer(record, names)
    messages = Message("user", question), Message("assistant", _GSM8K_CALCULATION.sub("", answer))
    return make_conversation(messages, record, names, origin)


def parse_gsm8k_calls(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Each calculation becomes a call of the calculator tool, followed by its result."""
    question, answer = _gsm8k_question_and_answer(record, names)
    steps, place = [], 0
    for found in _GSM8K_CALCULATION.finditer(answer):
        expression, equals, result = found.group(1).rpartition("=")
        if not equals or not expression.strip() or not result.strip():
            raise BadRecordError("bad sum", f"{shorten(found.group())} is not a calculation such as <<48/2=24>>")
        steps.append(CalculatorStep(answer[place : found.start()], expression, result))
        place = found.end()
    messages = Message("user", question), *calculator_messages(steps, answer[place:])
    return replace(make_conversation(messages, record, names, origin), tools=(CALCULATOR_SCHEMA,))


def _gsm8k_question_and_answer(record: Any, names: Mapping[str, str]) -> tuple[str, str]:
    record = require_object(record, _GSM8K_EXAMPLE)
    question = require_nonempty(require_field(record, names["question"]), f"'{names['question']}'")
    answer = require_nonempty(require_field(record, names["answer"]), f"'{names['answer']}'")
    if not _has_gsm8k_result(answer):
        raise BadRecordError("no result", f"'{names['answer']}' does not end with a line such as #### 24")
    return question, answer


def _has_gsm8k_result(answer: Any) -> bool:
    if not isinstance(answer, str):
        return False
    last = answer.rstrip().rpartition("\n")[2]
    return last.startswith(_GSM8K_RESULT) and len(last) > len(_GSM8K_RESULT)


# multiple-choice: MMLU's {"question", "choices": […], "answer": 2}, and ARC's with "answerKey": "C".
#
# The prompt lists the choices by letter; the answer is the letter. The wording of the prompt is whet's own.

MULTIPLE_CHOICE_FIELDS = {
    "question": ("question", "question_stem"),
    "choices": ("choices", "options"),
    "answer": ("answer", "answerKey"),
}
MULTIPLE_CHOICE_OPTIONAL = {"context": ("context", "passage", "article", "document")}
_MULTIPLE_CHOICE_EXAMPLE = '{"question": "…", "choices": ["…", "…"], "answer": 1}'


def recognise_multiple_choice(record: Any, fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Every set of field names under which the record matches."""
    listed = list_choices(record)
    found = match_fields(listed, MULTIPLE_CHOICE_FIELDS, ("question", "choices", "answer"), fields)
    return [names for names in found if isinstance(listed[names["choices"]], (list, dict, str))]


def list_choices(record: Any) -> Any:
    """The record with a list of choices, if it has a column per choice (question, A, B, C, D, answer) or, as in AI2's
    ARC files, the choices inside the question."""
    if not isinstance(record, dict):
        return record
    inner = record.get("question")
    if isinstance(inner, dict) and "stem" in inner and isinstance(inner.get("choices"), list):
        items = [each if isinstance(each, dict) else {} for each in inner["choices"]]
        choices: Any = {name: [each.get(name) for each in items] for name in ("text", "label")}
        return {**record, "question": inner["stem"], "choices": choices}
    if not {"A", "B", "answer"} <= record.keys() or "choices" in record:
        return record
    letters = [letter for letter in ascii_uppercase if record.get(letter) not in (None, "")]
    choices = [str(record[letter]) for letter in letters]
    if letters != list(ascii_uppercase[: len(letters)]):  # a column is empty: with labels the answer does not shift
        choices = {"label": letters, "text": choices}
    others = {key: value for key, value in record.items() if key not in {*ascii_uppercase}}
    return {"question": record.get("prompt"), **others, "choices": choices}


def parse_multiple_choice(record: Any, names: Mapping[str, str], origin: Origin) -> Conversation:
    """Parse a record; raises BadRecordError."""
    question, texts, correct = read_multiple_choice(record, names)
    messages = Message("user", multiple_choice_prompt(question, texts)), Message("assistant", ascii_uppercase[correct])
    return make_conversation(messages, record, names, origin)


def read_multiple_choice(record: Any, names: Mapping[str, str]) -> tuple[str, list[str], int]:
    """(question, choices, index of the correct choice); raises BadRecordError."""
    record = list_choices(require_object(record, _MULTIPLE_CHOICE_EXAMPLE))
    question = require_nonempty(require_field(record, names["question"]), f"'{names['question']}'")
    name, context = find_optional(record, "context", MULTIPLE_CHOICE_OPTIONAL["context"], names)
    if context is not None:
        question = f"{require_text(context, f'{name!r}')}\n\n{question}"
    texts, labels = _parse_choices(require_field(record, names["choices"]), names["choices"])
    correct = _correct_choice(require_field(record, names["answer"]), labels, len(texts), names["answer"])
    return question, texts, correct


def multiple_choice_prompt(question: str, choices: Sequence[str]) -> str:
    """The user turn."""
    lettered = "\n".join(f"- {letter}) {text}" for letter, text in zip(ascii_uppercase, choices, strict=False))
    return f"{question}\n\n{lettered}\n\nAnswer with the letter of the right choice only."


def _parse_choices(choices: Any, name: str) -> tuple[list[str], list[str] | None]:
    """The texts and, in ARC's schema or in an object such as MedQA's {"A": "…", "B": "…"}, their labels."""
    if isinstance(choices, dict) and "text" not in choices:
        choices = {"label": list(choices), "text": list(choices.values())}
    labels = choices.get("label") if isinstance(choices, dict) else None
    texts = choices.get("text") if isinstance(choices, dict) else decode_list(choices, f"'{name}'")
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(ascii_uppercase):
        found = f"a list of {len(texts)}" if isinstance(texts, list) else describe_type(texts)
        raise BadRecordError("bad choices", f"'{name}' must be a list of 2 to 26 strings, not {found}")
    if isinstance(choices, dict) and (not isinstance(labels, list) or len(labels) != len(texts)):
        raise BadRecordError("bad choices", f"'{name}' must have one label for each text")
    return [require_nonempty(text, f"choice {number} of '{name}'") for number, text in enumerate(texts, 1)], labels


def _correct_choice(answer: Any, labels: list[str] | None, choices: int, name: str) -> int:
    """The index of the correct choice. A digit as a string is accepted only as an ARC label: else 0-based or 1-based is
    unclear."""
    if labels is not None:
        if isinstance(answer, str) and labels.count(answer) == 1:
            return labels.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in ascii_uppercase[:choices]:
        return ascii_uppercase.index(answer)
    elif isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < choices:
        return answer
    known = ", ".join(map(str, labels)) if labels else f"0 to {choices - 1} or A to {ascii_uppercase[choices - 1]}"
    raise BadRecordError("bad answer", f"'{name}' is {shorten(answer)}; it must be one of {known}")
