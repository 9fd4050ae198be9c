// Invented data in the form of src/schema.ts, to work on the pages without a run: `out/report.html`, one file, and the
// pieces that server.mjs serves. The texts are hostile on purpose: what is shown as markup is a bug.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { crc32, deflateSync } from "node:zlib";

const here = new URL(".", import.meta.url);
const assets = new URL("../../paravt/report/assets/", import.meta.url);
const HOSTILE = `<script>document.body.dataset.hacked = "1"</script><img src=x onerror="document.body.dataset.hacked = '1'"> "quoted" 'text'\nnew line`;

let seed = 7;
const random = () => ((seed = (seed * 1103515245 + 12345) & 0x7fffffff) / 0x7fffffff);
const pick = (items) => items[Math.floor(random() * items.length)];
const between = (low, high) => low + random() * (high - low);

/** A small PNG: sky, ground and a sun whose place tells the time. */
export function picture(share, width = 64, height = 36) {
  const rows = Buffer.alloc((width * 3 + 1) * height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const sun = (x - share * width) ** 2 + (y - 9) ** 2 < 30;
      const ground = y > 24 + 4 * Math.sin(x / 7 + share * 20);
      const colour = sun ? [255, 220, 90] : ground ? [40 + 60 * share, 110, 70] : [90 - 60 * share, 150 - 60 * share, 220 - 90 * share];
      rows.set(colour.map(Math.round), y * (width * 3 + 1) + 1 + x * 3);
    }
  }
  const chunk = (type, data) => {
    const body = Buffer.concat([Buffer.from(type), data]);
    const out = Buffer.alloc(body.length + 8);
    out.writeUInt32BE(data.length, 0);
    body.copy(out, 4);
    out.writeUInt32BE(crc(body), body.length + 4);
    return out;
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head.set([8, 2, 0, 0, 0], 8);
  const png = Buffer.concat([Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]), chunk("IHDR", head), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))]);
  return `data:image/png;base64,${png.toString("base64")}`;
}
const crc = crc32 ?? ((data) => {
  let value = ~0;
  for (const byte of data) for (let bit = ((value ^= byte), 0); bit < 8; bit++) value = (value >>> 1) ^ (value & 1 ? 0xedb88320 : 0);
  return ~value >>> 0;
});
const pictures = Array.from({ length: 40 }, (_, index) => picture(index / 39));
export const frameAt = (time, duration) => ({ time, picture: pictures[Math.round((time / duration) * 39)] });

const piece = (text, kind, advantage = 0, images = 0) => {
  const spelled = kind === "sampled" ? (text.match(/<\|im_end\|>|<\/?tool_call>|<\/?|\w+>|\s?\w+|[^\w]/g) ?? []) : null;
  return {
    text, kind, images, tokens: spelled?.length ?? Math.ceil(text.length / 4), spelled,
    logprobs: spelled?.map(() => -(random() ** 6) * 6) ?? null,
    advantages: spelled?.map((token) => advantage + (/^<\/?|>$/.test(token) ? 0.4 : 0)) ?? null,
  };
};

const QUESTIONS = ["Which city is named on the second slide of the talk?", "What does the woman put on the table after the guests have left?", "How often does the red car pass the bridge?", "When does the dog leave the garden, from when to when?", HOSTILE];
const REPORTS = ["A slide with the words Oslo and 1952, from 32 to 41 seconds. It bears on the question.", "Only the speaker is to be seen; nothing bears on the question.", "At 1:12 a red car passes the bridge from left to right.", HOSTILE];
export const STATUSES = ["ran", "ran", "ran", "ran", "repaired", "bad", "failed", "timed_out", "skipped"];

export function crop(turn, index, duration, status = pick(STATUSES), advantage = 0) {
  const start = status === "bad" ? null : Math.round(between(0, duration * 0.85) * 10) / 10;
  const end = start === null ? null : Math.round(Math.min(duration, start + between(0.02, 0.3) * duration) * 10) / 10;
  const ran = status === "ran" || status === "repaired";
  const report = ran ? pick(REPORTS) : null;
  const times = ran ? Array.from({ length: 8 }, (_, n) => start + ((end - start) * (n + 0.5)) / 8) : [];
  const call = status === "bad" ? '{"name": "crop_video", "arguments": {"start_time": "later"' : `{"name": "crop_video", "arguments": {"start_time": ${start}, "end_time": ${end}}}`;
  return {
    turn, index, status, start, end, call, report,
    error: { bad: "start_time is not a number: 'later'", failed: "the engine did not answer: connection refused", timed_out: "no report after 30 seconds", skipped: "more than 8 calls in one turn" }[status] ?? null,
    missing: random() < 0.15 && ran ? ["frame at 41.0 s: the packet is damaged"] : [],
    frames: times.map((time, n) => (n === 5 && random() < 0.3 ? { time, picture: null, why: "left out to keep the file small" } : frameAt(time, duration))),
    pieces: ran ? [piece(`<|im_start|>user\nThese frames are from ${start} to ${end} seconds of a longer video.`, "context", 0, times.length), piece("", "forced"), piece(`${report}<|im_end|>`, "sampled", advantage)] : [],
    seconds: between(0.3, 4), sampled_tokens: ran ? 21 : 0,
  };
}

export function episode(id, { question, K, dispatch, advantage, calls, failures, answer, truth, accuracy, duration = 1830 }) {
  const turns = [];
  const crops = [];
  const parallel = dispatch === "parallel";
  for (let n = 0; n < (parallel ? Math.min(1, calls) : calls); n++) {
    const here = Array.from({ length: parallel ? calls : 1 }, (_, index) => crop(n, index, duration, undefined, advantage));
    crops.push(...here);
    const text = `The overview shows a talk. I should look closer at the slides, from ${Math.round(here[0].start ?? 3)} to 90 seconds and later.</think>\n${here.map(({ call }) => `<tool_call>\n${call}\n</tool_call>`).join("\n")}<|im_end|>`;
    const before = n ? `<|im_start|>user\n<tool_response>\n${crops[n - 1].report ?? "error"}\n</tool_response><|im_end|>\n` : `<|im_start|>system\nYou answer questions about a long video.<|im_end|>\n<|im_start|>user\nQuestion: ${question}<|im_end|>\n`;
    turns.push({ index: n, strict: true, failure: null, text: `<think>${text}`, pieces: [piece(before, "context", 0, n ? 0 : K), piece("<|im_start|>assistant\n<think>", "forced"), piece(text, "sampled", advantage)] });
  }
  const last = `The reports agree: it is at 1:12.</think>\n<answer>${answer ?? ""}</answer>${failures.includes("junk_after") ? " I hope this helps!" : ""}<|im_end|>`;
  turns.push({ index: turns.length, strict: !failures.length, failure: failures[0] ?? null, text: `<think>${last}`, pieces: [piece("<tool_response>\nreports\n</tool_response>", "context"), piece("<|im_start|>assistant\n<think>", "forced"), piece(last, "sampled", advantage)] });
  return {
    id, question, options: ["Oslo", "Rome", HOSTILE, "Lima"], truth, video: `talks/a "long" <b>name</b>.mp4`, video_url: null, duration, frame_budget: K, dispatch, answer, forced: failures.includes("forced"), end: answer === null ? "max_turns" : "answered",
    overview: Array.from({ length: K }, (_, n) => (n === 3 && K < 20 ? { time: ((n + 0.5) / K) * duration, picture: null, why: "the packet is damaged" } : frameAt(((n + 0.5) / K) * duration, duration))),
    turns, crops,
    rewards: { accuracy: { value: accuracy, explanation: accuracy === null ? "main: the engine did not answer" : accuracy ? "B, right is B" : "A, right is B" }, format: { value: failures.length ? 0.4 : 1, explanation: "" }, tool: { value: calls ? 0.5 : 0, explanation: "" }, total: { value: accuracy === null ? null : accuracy + 0.5, explanation: "" } },
    errors: accuracy === null ? [{ kind: "engine_error", where: "main, turn 2", message: `connection refused ${HOSTILE}`, scored: false }] : [],
    timings: { video: 1.2, engine: 6.4, total: 7.9 }, prompt_tokens: 4210, sampled_tokens: 188,
  };
}

function run(id, name, group, seed, steps, drift) {
  const episodes = [];
  const chunks = {};
  for (let step = 0; step < steps; step += 5) {
    for (let prompt = 0; prompt < 5; prompt++) {
      const chunk = `${id}-${step}-${prompt}`;
      chunks[chunk] = {};
      const question = QUESTIONS[prompt];
      for (let n = 0; n < 8; n++) {
        const learnt = step / steps;
        const accuracy = random() < 0.04 ? null : Number(random() < 0.3 + 0.5 * learnt * drift);
        const failures = random() < 0.6 * (1 - learnt) ? [pick(["junk_after", "think_unclosed", "call_malformed", "forced", "answer_empty"])] : [];
        const about = { question, K: [4, 16, 64][prompt % 3], dispatch: n === 7 ? "sequential" : "parallel", advantage: between(-1, 1), calls: Math.floor(random() * 5), failures, answer: accuracy === null ? null : accuracy ? "Oslo" : pick(["Rome", "Lima", HOSTILE]), truth: "Oslo", accuracy };
        const name = `${step}/${prompt}/${n}`;
        const held = (chunks[chunk][name] = episode(name, about));
        const left = step === 10 && n === 3;
        episodes.push({
          id: name, chunk: left ? "" : chunk, step, group: `${step}/${prompt}`, sample: `q${prompt}`, question, frame_budget: about.K, dispatch: about.dispatch, calls: about.calls, turns: held.turns.length,
          answer: held.answer, truth: "Oslo", rewards: Object.fromEntries(Object.entries(held.rewards).map(([key, { value }]) => [key, value])), advantage: accuracy === null ? null : about.advantage, failures, end: held.end, errors: held.errors.length, seconds: between(2, 9),
        });
        if (left) delete chunks[chunk][name];
      }
    }
  }
  const step = Array.from({ length: steps }, (_, n) => n);
  const curve = (from, to, noise) => step.map((n) => from + (to - from) * (1 - Math.exp((-3 * n) / steps)) + between(-noise, noise));
  const values = {
    "reward/total": curve(0.4, 1.2 * drift, 0.1), "reward/accuracy": curve(0.35, 0.7 * drift, 0.08), "reward/format": curve(0.4, 0.95, 0.05), "reward/tool": curve(0.2, 0.5 * drift, 0.05),
    f_strict: curve(0.1, 0.95, 0.04), f_graded: curve(0.4, 0.97, 0.03), junk: curve(0.5, 0.02, 0.05), kappa: curve(3, 3 * drift, 0.3), attempts: curve(3.4, 3.1 * drift, 0.3),
    "accuracy/with_calls": curve(0.4, 0.75, 0.08), "accuracy/without_calls": curve(0.3, 0.4, 0.1).map((value, n) => (n % 5 ? null : value)), entropy: curve(0.9, 0.3, 0.05), loss: curve(0.01, -0.02, 0.02),
    "token/kl_old": curve(0, 0.002, 0.001), "token/kl_ref": curve(0, 0.05, 0.005), "token/mismatch": curve(0.001, 0.002, 0.0005), "staleness/mean": curve(0, 1, 0.2), "staleness/max": step.map(() => Math.floor(random() * 3)),
    tokens_per_second: curve(2100, 2500, 200), rollout: curve(3, 2, 0.4), learn: curve(2, 2, 0.2), grad_norm: curve(1, 0.4, 0.2), learning_rate: curve(1e-5, 0, 0),
  };
  const made = { paravt: "0.1.0", git: "0123abc", command: `paravt rl recipes/lab/rl/full.yaml --out runs/${name}`, python: "3.12.3", torch: "2.9.0" };
  return [{ id, name, group, kind: "rl", seed, made, recipe: JSON.stringify({ seed, rollout: { group_size: 8 } }, null, 2), warnings: seed === 1 ? [`12 groups had equal rewards ${HOSTILE}`] : [], metrics: { step, values }, tables: [], episodes }, chunks];
}

export function everything() {
  const [runs, chunks] = [[], {}];
  for (const [name, drift, seeds] of [["full", 1, 3], ["vanilla", 0.6, 2], ["sft", 0.8, 1]]) {
    for (let n = 0; n < seeds; n++) {
      const [made, held] = run(`${name}/${n}`, `${name} seed ${n}`, name, n, 60, drift);
      runs.push(made);
      Object.assign(chunks, held);
    }
  }
  const first = runs[0].episodes;
  runs[0].tables = [
    { title: "Ablation", columns: ["row", "strict", "kappa", "accuracy"], rows: [["base", 0.05, 1.87, 0.36], ["vanilla", 0.4, 0.31, 0.52], ["full", 0.93, 2.94, 0.65], [HOSTILE, null, 0, 1234567]].map((cells) => ({ cells })) },
    { title: "Questions that flipped", columns: ["question", "before", "after"], rows: [{ cells: [first[0].question, "Rome", "Oslo"], link: [first[0].id] }, { cells: ["All of the first step", null, null], link: first.slice(0, 40).map(({ id }) => id) }] },
  ];
  const report = { format: 1, title: "PARA-GRPO in the lab: three rows", notes: ["Of 2,880 episodes 2,868 are in this file, evenly from all steps.", HOSTILE], runs, live: false };
  return { report, chunks };
}

export function html(page, body) {
  const read = (name) => readFileSync(new URL(`${page}.${name}`, assets), "utf8");
  const policy = `default-src 'none'; script-src 'nonce-x'; style-src 'nonce-x'; img-src data:; connect-src 'self'; media-src 'self'`;
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" content="${policy}"><title>ParaVT</title><style nonce="x">${read("css")}</style></head><body><div id="app"></div>${body}<script nonce="x">${read("js")}</script></body></html>`;
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  const { report, chunks } = everything();
  const script = (id, data) => `<script type="application/json+deflate" id="${id}">${deflateSync(JSON.stringify(data)).toString("base64")}</script>`;
  const body = [script("report", report), ...Object.entries(chunks).map(([name, chunk]) => script(`chunk-${encodeURI(name)}`, chunk))].join("\n");
  mkdirSync(new URL("out/", here), { recursive: true });
  writeFileSync(new URL("out/report.html", here), html("report", body));
}
