// Pictures of the pages in a real browser: `node dev/shots.mjs [part of a name]`, out/NAME.png. Complains about errors of
// the page, about anything wider than the window, and about markup of the data that came alive.
import { chromium } from "playwright-core";

const out = new URL("out/", import.meta.url);
const report = new URL("report.html", out).href;
const ask = "http://127.0.0.1:8799/ask.html";
const ep = (run, id) => `ep=${encodeURIComponent(`${encodeURIComponent(run)}/${encodeURIComponent(id)}`)}`;
const group = (run, id) => encodeURIComponent(`${encodeURIComponent(run)}/${encodeURIComponent(id)}`);
const firstLane = async (page) => {
  await page.locator(".lane").first().waitFor();
  await page.locator(".lane").first().click();
};
const shots = [
  ["curves", `${report}#tab=curves`],
  ["tables", `${report}#tab=tables`],
  ["made", `${report}#tab=made`],
  ["list", `${report}#tab=episodes&sort=reward&down=1`],
  ["groups", `${report}#tab=episodes&by=group`],
  ["group", `${report}#tab=episodes&group=${group("full/0", "0/1")}&other=${group("full/0", "55/1")}`],
  ["episode", `${report}#${ep("full/0", "5/1/1")}`, firstLane],
  ["hostile", `${report}#${ep("full/0", "5/4/2")}&heat=logprob`],
  ["heat", `${report}#${ep("full/1", "15/2/1")}&heat=advantage`],
  ["beside", `${report}#${ep("full/0", "5/1/1")}&beside=${group("full/0", "5/1/7")}`],
  ["ask", ask],
  ["asked", `${ask}#ask=seen`, firstLane],
  ["asking", ask, async (page) => {
    await page.fill("[name=question]", "How long does the second slide stay?");
    await page.click(".primary");
    await page.locator(".bar.running").first().waitFor();
    await page.waitForTimeout(1500);
  }],
];
const looks = [["wide", 1280, "light"], ["narrow", 400, "light"], ["wide-dark", 1280, "dark"], ["narrow-dark", 400, "dark"]];

const [wanted = "", look = ""] = process.argv.slice(2);
const flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: flags });
for (const [suffix, width, colorScheme] of looks.filter(([suffix]) => look === "" || suffix === look)) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, reducedMotion: "reduce" });
  for (const [name, address, act] of shots.filter(([name]) => wanted === "" || wanted.split(",").includes(name))) {
    const page = await context.newPage();
    page.setDefaultTimeout(120_000);
    page.on("pageerror", (error) => console.error(`${name}-${suffix}: ${error.message}`));
    page.on("console", (message) => message.type() === "error" && console.error(`${name}-${suffix}: ${message.text()}`));
    await page.goto(address, { timeout: 120_000 });
    await page.locator("h1").waitFor();
    await act?.(page);
    await page.waitForTimeout(700);
    const { wide, hacked } = await page.evaluate(() => ({
      wide: document.documentElement.scrollWidth - innerWidth,
      hacked: document.body.dataset.hacked ?? document.querySelectorAll("#app script").length > 0,
    }));
    if (wide > 0 || hacked) console.error(`${name}-${suffix}: ${wide} px too wide, hacked: ${hacked}`);
    await page.screenshot({ path: new URL(`${name}-${suffix}.png`, out).pathname, fullPage: name !== "list" });
    await page.close();
  }
}
await browser.close();
