export default class uPlot { constructor(options: object, values: unknown[][], place: Element); }
