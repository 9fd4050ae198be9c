// Where a page's data comes from: the page itself (static files) or the server beside it (`paravt view`).
import type { Chunk, Episode, Pictures, Report, Thumbnail } from "../schema";
import { get } from "./net";

const chunks = new Map<string, Promise<Chunk>>();
const pictures = new Map<string, Promise<Pictures>>();

/** Text of base64 over zlib over JSON, the form in which static pages hold their data. */
async function inflate(text: string): Promise<unknown> {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

async function load<T>(id: string, address: string): Promise<T> {
  const held = document.getElementById(id);
  return (held ? inflate(held.textContent ?? "") : get(address)) as Promise<T>;
}

export async function loadReport(): Promise<Report> {
  const report = await load<Report>("report", "data/report.json");
  if (report.format !== 1) throw new Error(`This page reads format 1 of a report, and its data has ${report.format}.`);
  return report;
}

/** Rejects if the chunk cannot be had or lacks the episode. */
export async function loadEpisode(chunk: string, id: string): Promise<Episode> {
  for (let attempt = 0; attempt < 2; attempt++) {
    let loading = chunks.get(chunk);
    if (!loading) {
      loading = load<Chunk>(`chunk-${chunk}`, `data/chunks/${encodeURIComponent(chunk)}.json`);
      chunks.set(chunk, loading);
      loading.catch(() => chunks.delete(chunk));
    }
    const found = Object.entries(await loading).find(([key]) => key === id);
    if (found) return withPictures(found[1]);
    chunks.delete(chunk); // a chunk of a run that goes on has grown since
  }
  throw new Error(`Episode ${id} is not in chunk ${chunk}.`);
}

/** The episode with the pictures that its file has once for many episodes. */
async function withPictures(episode: Episode): Promise<Episode> {
  const [overview, crops] = await Promise.all([
    Promise.all(episode.overview.map(resolve)),
    Promise.all(episode.crops.map(async (crop) => ({ ...crop, frames: await Promise.all(crop.frames.map(resolve)) }))),
  ]);
  return { ...episode, overview, crops };
}

async function resolve(frame: Thumbnail): Promise<Thumbnail> {
  const [, name, key] = /^#([\w-]+)\/(.*)$/s.exec(frame.picture ?? "") ?? [];
  if (name === undefined || key === undefined) return frame;
  const loading = pictures.get(name) ?? load<Pictures>(`pictures-${name}`, `data/pictures/${name}.json`);
  pictures.set(name, loading);
  const held = await loading;
  return { ...frame, picture: Object.hasOwn(held, key) ? held[key] : null };
}
