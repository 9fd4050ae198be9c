import { useRef, useState } from "preact/hooks";
import type { AskRequest, VideoInfo } from "../schema";
import { post, upload } from "../shared/net";
import { clock } from "../shared/words";

interface Props {
  videos: VideoInfo[];
  video: string;
  onVideo: (id: string) => void;
  onUploaded: (video: VideoInfo) => void;
  onAsked: (id: string) => void;
}

const DISPATCH: [AskRequest["dispatch"], string][] = [["parallel", "parallel"], ["sequential", "one by one"], ["none", "overview only"]];

export function Form({ videos, video, onVideo, onUploaded, onAsked }: Props) {
  const [sent, setSent] = useState<number | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const stop = useRef<AbortController | null>(null);
  const attempt = async (work: () => Promise<void>) => {
    setProblem(null);
    await work().catch((error: Error) => setProblem(error.message));
  };

  const send = (file: File | undefined) =>
    file &&
    attempt(async () => {
      stop.current = new AbortController();
      setSent(0);
      try {
        onUploaded((await upload("v1/videos", file, setSent, stop.current.signal)) as VideoInfo);
      } finally {
        setSent(null);
      }
    });

  const ask = (event: SubmitEvent) => {
    event.preventDefault();
    if (busy) return;
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const text = (name: string) => String(form.get(name) ?? "").trim();
    const request: AskRequest = {
      video,
      question: text("question"),
      options: text("options").split("\n").map((line) => line.trim()).filter(Boolean),
      frame_budget: Number(text("frame_budget")),
      dispatch: text("dispatch") as AskRequest["dispatch"],
    };
    void attempt(async () => {
      setBusy(true);
      try {
        onAsked(((await post("v1/ask", request)) as { id: string }).id);
      } finally {
        setBusy(false);
      }
    });
  };

  return (
    <form class="ask-form" onSubmit={ask} aria-label="A question">
      <label class="stack">Video
        <select value={video} onChange={(event) => onVideo(event.currentTarget.value)} required>
          {!videos.length && <option value="">none yet: upload one</option>}
          {videos.map(({ id, name, duration }) => <option key={id} value={id}>{name} ({clock(duration)})</option>)}
        </select>
      </label>
      <label class="stack">or upload one
        <input type="file" accept="video/*,.mkv,.ts" disabled={sent !== null} onChange={(event) => {
          void send(event.currentTarget.files?.[0]);
          event.currentTarget.value = "";
        }} />
      </label>
      {sent !== null && (
        <p class="sending" role="status">
          <progress max={1} value={sent} aria-label="Uploaded" /> {sent < 1 ? `${Math.floor(sent * 100)} %` : "reading the video…"}
          <button type="button" onClick={() => stop.current?.abort()}>Stop</button>
        </p>
      )}
      <label class="stack">Question<textarea name="question" rows={3} required maxLength={4000} /></label>
      <label class="stack">Options, one on each line, if there are any<textarea name="options" rows={2} /></label>
      <div class="two">
        <label class="stack">Overview frames<input name="frame_budget" type="number" min={1} max={1024} defaultValue="64" required /></label>
        <label class="stack">Crops<select name="dispatch">{DISPATCH.map(([name, label]) => <option key={name} value={name}>{label}</option>)}</select></label>
      </div>
      {problem && <p class="errors" role="alert">{problem}</p>}
      <button type="submit" class="primary" disabled={!video} aria-disabled={busy}>{busy ? "Sending…" : "Ask"}</button>
    </form>
  );
}
