declare const htm: { bind(h: unknown): (words: TemplateStringsArray, ...values: unknown[]) => any };
export default htm;
