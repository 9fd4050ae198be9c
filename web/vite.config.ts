import { defineConfig } from "vite";

// One classic script and one style sheet for each page (`--mode report`, `--mode ask`): Python puts them into the page.
export default defineConfig(({ mode }) => ({
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir: "../paravt/report/assets",
    emptyOutDir: false,
    target: "es2022",
    lib: { entry: `src/${mode}/main.tsx`, formats: ["iife"], name: "paravt", fileName: () => `${mode}.js`, cssFileName: mode },
  },
  plugins: [
    {
      name: "safe-inside-a-page",
      generateBundle(_, bundle) {
        for (const file of Object.values(bundle)) {
          const text = file.type === "chunk" ? file.code : String(file.source);
          const found = /<\/(?:script|style)|<script|<!--|\beval\(|new Function\(|@import|https?:\/\/(?!www\.w3\.org)/i.exec(text);
          if (found) this.error(`${file.fileName} has ${found[0]}, which a page that is one file cannot hold`);
        }
      },
    },
  ],
}));
