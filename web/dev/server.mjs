// The ask page before a server that plays an invented answer, and the report as `paravt view` would serve it (report.html
// of fake.mjs is the static one): http://127.0.0.1:8799/ask.html and /report.html. The page is read anew each time.
import { createReadStream, existsSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { crop, episode, everything, frameAt, html } from "./fake.mjs";

const DURATION = 128;
const film = new URL("out/v.mp4", import.meta.url);
const videos = [{ id: "v1", name: "talk.mp4", duration: DURATION, width: 320, height: 240, url: "v1/videos/v1/file" }];
const asks = new Map();
let live = null;

function play(ask) {
  const say = (event) => {
    ask.events.push(event);
    const { event: name, ...data } = event;
    for (const stream of ask.streams) stream.write(`event: ${name}\ndata: ${JSON.stringify(data)}\n\n`);
    if (["done", "failed", "cancelled"].includes(name)) {
      ask.state = name;
      for (const stream of ask.streams) stream.end();
    }
  };
  const about = { question: ask.question, K: 16, dispatch: "parallel", advantage: 0, calls: 3, failures: [], answer: "Oslo, at 72 seconds", truth: null, accuracy: 1, duration: DURATION };
  const whole = { ...episode(ask.id, about), rewards: {}, errors: [], video_url: videos[0].url, video: "talk.mp4", options: [] };
  whole.crops = [0, 1, 2].map((index) => crop(0, index, DURATION, index === 1 ? "timed_out" : "ran"));
  const script = [
    [0, { event: "queued", position: 2 }], [700, { event: "queued", position: 1 }], [1200, { event: "started" }],
    [1500, { event: "overview", duration: DURATION, frames: whole.overview }],
    [2500, { event: "turn", index: 0, text: whole.turns[0].text, calls: 3, answer: null }],
    ...whole.crops.map(({ turn, index, start, end }) => [2600, { event: "crop_started", turn, index, start, end }]),
    ...whole.crops.map((done, n) => [4000 + 1500 * n, { event: "crop_done", crop: done }]),
    [8500, { event: "turn", index: 1, text: whole.turns[1].text, calls: 0, answer: whole.answer }],
    [8700, { event: "done", episode: whole }],
  ];
  ask.say = say;
  const stays = ask.question.includes("stay"); // for pictures of a question that is being answered
  ask.timers = script.filter(([after]) => !stays || after < 5000).map(([after, event]) => setTimeout(() => {
    if (event.event === "started") ask.state = "running";
    if (event.event === "done") ask.answer = whole.answer;
    say(event);
  }, ask.fast ? 0 : after));
}

function start(id, question, fast = false) {
  asks.set(id, { id, video: "v1", question, answer: null, state: "queued", events: [], streams: [], fast });
  play(asks.get(id));
}
start("seen", "Which city is on the second slide?", true);

const json = (response, data, status = 200) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(data));

createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://x").pathname);
  const ask = asks.get(path.split("/")[3]);
  let body = "";
  if (path === "/ask.html" || path === "/report.html") return response.writeHead(200, { "Content-Type": "text/html" }).end(html(path.slice(1, -5), ""));
  if (path === "/data/report.json") return json(response, { ...(live ??= everything()).report, live: true });
  if (path.startsWith("/data/chunks/")) return json(response, live.chunks[path.slice(13, -5)]);
  if (path === "/v1/videos" && request.method === "GET") return json(response, videos);
  if (path === "/v1/videos") return request.resume().on("end", () => json(response, { detail: "clip.mp4 has no video stream" }, 422));
  if (path.endsWith("/file") && existsSync(film)) {
    const size = statSync(film).size;
    const [from, to] = (request.headers.range ?? "bytes=0-").slice(6).split("-");
    const last = to ? Number(to) : size - 1;
    response.writeHead(206, { "Content-Type": "video/mp4", "Accept-Ranges": "bytes", "Content-Range": `bytes ${from}-${last}/${size}`, "Content-Length": last - from + 1 });
    return createReadStream(film, { start: Number(from), end: last }).pipe(response);
  }
  if (path === "/v1/asks") return json(response, [...asks.values()].reverse().map(({ id, video, question, answer, state }) => ({ id, video, question, answer, state })));
  if (path === "/v1/ask") {
    return request.on("data", (data) => (body += data)).on("end", () => {
      const id = `a${asks.size}`;
      start(id, JSON.parse(body).question);
      json(response, { id }, 202);
    });
  }
  if (ask && path.endsWith("/events")) {
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    for (const { event, ...data } of ask.events) response.write(`event: ${event}\ndata: ${JSON.stringify(data)}\n\n`);
    return ask.streams.push(response);
  }
  if (ask && request.method === "DELETE") {
    ask.timers.forEach(clearTimeout);
    ask.say({ event: "cancelled" });
    return json(response, {});
  }
  if (ask) return json(response, { id: ask.id, state: ask.state, position: null, events: ask.events });
  return json(response, { detail: `there is no ${path}` }, 404);
}).listen(8799, "127.0.0.1", () => console.log("http://127.0.0.1:8799/ask.html and /report.html"));
