// How a client program for Node reports; the same as checks.py.
export const [MODEL, URL, REASONING_URL] = process.argv.slice(2);
export const ANSWER = "42";
export const MESSAGES = [{ role: "user", content: "What is 17 + 25?" }];
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Bern", "Oslo"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "weather", description: "Forecast.", parameters: WEATHER },
};

export function assert(condition, text = "wrong answer") {
  if (!condition) throw new Error(text);
}

export function isForecast(value) {
  assert(["Bern", "Oslo"].includes(value.city) && Number.isInteger(value.days), JSON.stringify(value));
}

export async function run(checks) {
  const found = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      found[name] = "";
    } catch (error) {
      console.error(error);
      found[name] = `${error.name}: ${error.message}`.slice(0, 300);
    }
  }
  console.log(JSON.stringify(found));
}
